"""The sub-benchmark ``foretold``: times that `hfusion.simulate` predicts for new plans, and those of their runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from rich.table import Table

from hfusion.bench.cases import FuseCase
from hfusion.bench.progress import Meter
from hfusion.bench.workload import Workload
from hfusion.cluster.train_tasks import plan, train
from hfusion.device.machine import Device, Machine
from hfusion.optim.adam import Adam
from hfusion.schedule.simulate import simulate
from hfusion.tasks.task import Task

MODELS = ("mlp-large", "cnn", "transformer")
MEMBERS = (4,)
STEPS = 12


@dataclass(frozen=True)
class ForetoldSettings:
    """The cases, and the number of rounds after a warm-up."""

    cases: tuple[FuseCase, ...]
    members: tuple[int, ...]
    rounds: int
    device: torch.device


@dataclass(frozen=True)
class ForetoldRow:
    """Seconds of ``steps`` minibatches: predicted (``said``), the median of those measured, and their ``ratio``."""

    model: str
    members: int
    steps: int
    said: float
    ran: float
    ratio: float


def pieces(settings: ForetoldSettings) -> int:
    """Return the number of pieces of work that ``run`` reports."""
    return len(settings.cases) * len(settings.members)


def run(settings: ForetoldSettings, meter: Meter) -> Iterator[ForetoldRow]:
    """One array after the other, alone on the device, all of whose memory it may take."""
    name = settings.device.type
    memory = Machine.detect().devices[0].memory
    machine = Machine([Device(name, memory=memory)])
    for case in settings.cases:
        for members in settings.members:
            meter.say(f"{case.name}, {members} members")
            yield _row(Workload(case, members, torch.device("cpu")), machine, settings.rounds)
            meter.advance(1)


def _row(workload: Workload, machine: Machine, rounds: int) -> ForetoldRow:
    case, rates = workload.case, list(workload.rates)
    batches = [workload.batch()] * STEPS
    task = Task(workload.models(), case.loss, lambda params: Adam(params, lr=rates), batches, name=case.name)
    training_plan = plan(task, machine)
    predicted = simulate(training_plan).makespan
    ran = median([train(task, machine, plan=training_plan).timeline.makespan for _ in range(rounds + 1)][1:])
    return ForetoldRow(case.name, workload.members, STEPS, predicted, ran, ran / predicted)


def table(rows: Sequence[ForetoldRow]) -> Table:
    """A row per model and number of members."""
    shown = Table(title="seconds of a run that a fresh plan foretells, and that it takes")
    shown.add_column("model", no_wrap=True)
    for heading in ("members", "minibatches", "said s", "ran s", "ran / said"):
        shown.add_column(heading, justify="right")
    for row in rows:
        counts = (str(row.members), str(row.steps))
        shown.add_row(row.model, *counts, f"{row.said:.3f}", f"{row.ran:.3f}", f"{row.ratio:.2f}")
    return shown

"""The sub-benchmark ``train``: minibatches of `hfusion.train`, compiled, against a loop over `hfusion.train_step`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from rich.table import Table

from hfusion.array.fuse import fuse
from hfusion.array.module import FusedModule
from hfusion.bench import serial
from hfusion.bench.cases import FuseCase
from hfusion.bench.progress import Meter
from hfusion.bench.workload import Workload
from hfusion.cluster.train_tasks import train
from hfusion.device.machine import Device, Machine
from hfusion.optim.adam import Adam
from hfusion.step.train_step import TrainStep, train_step
from hfusion.tasks.task import Task

MODELS = ("mlp-small", "mlp-large", "cnn", "transformer")
MEMBERS = (16,)
# Minibatches of a timed loop, and of a short run, from which the cost of a run without its minibatches follows.
_SECONDS, _FEW = 2.0, 2


@dataclass(frozen=True)
class TrainSettings:
    """The cases, and the number of rounds, in each of which both contenders run."""

    cases: tuple[FuseCase, ...]
    members: tuple[int, ...]
    rounds: int
    device: torch.device


@dataclass(frozen=True)
class TrainRow:
    """Milliseconds of a minibatch both ways, medians, and the median of their ratios.

    ``first``: seconds of the first run of two minibatches, which captures and loads or compiles; ``again``: of one like
    it afterwards, the median.
    """

    model: str
    members: int
    step_ms: float
    train_ms: float
    ratio: float
    first: float
    again: float


def pieces(settings: TrainSettings) -> int:
    """Return the number of pieces of work that ``run`` reports."""
    return len(settings.cases) * len(settings.members)


def run(settings: TrainSettings, meter: Meter) -> Iterator[TrainRow]:
    """One array after the other, alone on the device."""
    for case in settings.cases:
        for members in settings.members:
            meter.say(f"{case.name}, {members} members")
            yield _row(Workload(case, members, settings.device), settings.rounds)
            meter.advance(1)


def _row(workload: Workload, rounds: int) -> TrainRow:
    array = fuse(workload.models())
    step = train_step(array, workload.case.loss, Adam(serial.trained(array), lr=list(workload.rates)), compile=True)
    _loop(step, workload, 5)
    count = max(_FEW, int(_SECONDS / _loop(step, workload, _FEW)))
    # On the host, as their minibatches: what is trained comes back to it.
    home = replace(workload, device=torch.device("cpu"))
    trained = fuse(home.models())
    first = _train(trained, home, workload.device, _FEW)
    loops, runs, again = [], [], []
    for _ in range(rounds):
        loops.append(_loop(step, workload, count))
        again.append(_train(trained, home, workload.device, _FEW))
        runs.append((_train(trained, home, workload.device, _FEW + count) - again[-1]) / count)
    ratio = median(run_seconds / loop_seconds for run_seconds, loop_seconds in zip(runs, loops, strict=True))
    name = workload.case.name
    return TrainRow(name, workload.members, 1e3 * median(loops), 1e3 * median(runs), ratio, first, median(again))


def _loop(step: TrainStep, workload: Workload, count: int) -> float:
    """Seconds of a step."""
    inputs, target = workload.batch()
    began = time.perf_counter()
    for _ in range(count):
        losses = step(inputs, target)
    losses.tolist()
    return (time.perf_counter() - began) / count


def _train(array: FusedModule, workload: Workload, device: torch.device, count: int) -> float:
    """Seconds of a run of so many minibatches on ``device``, planning and all."""
    batches = [workload.batch()] * count
    task = Task(
        array,
        workload.case.loss,
        lambda _: Adam(serial.trained(array), lr=list(workload.rates)),
        batches,
        name=workload.case.name,
        compile=True,
    )
    memory = next(detected.memory for detected in Machine.detect().devices if detected.physical.type == device.type)
    began = time.perf_counter()
    train(task, Machine([Device(device.type, memory=memory)]))
    return time.perf_counter() - began


def table(rows: Sequence[TrainRow]) -> Table:
    """A row per model and number of members."""
    shown = Table(title="a minibatch in a loop over train_step, and in hf.train")
    shown.add_column("model", no_wrap=True)
    for heading in ("members", "train_step ms", "hf.train ms", "ratio", "first run s", "later runs s"):
        shown.add_column(heading, justify="right")
    for row in rows:
        times = (
            f"{row.step_ms:.3f}",
            f"{row.train_ms:.3f}",
            f"{row.ratio:.2f}",
            f"{row.first:.2f}",
            f"{row.again:.2f}",
        )
        shown.add_row(row.model, str(row.members), *times)
    return shown

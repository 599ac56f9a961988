"""The sub-benchmark ``fuse``: one whole training step of B models, by every contender."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hfusion.bench import serial, timing
from hfusion.bench.cases import FuseCase
from hfusion.bench.progress import Meter
from hfusion.bench.results import Cell, ModelResult
from hfusion.bench.workload import (
    Contender,
    Disagreement,
    Running,
    Unavailable,
    Workload,
    check_agreement,
    error_line,
    losses,
)

AGREEMENT_STEPS = 4


@dataclass(frozen=True)
class FuseSettings:
    """Settings of the comparison. ``slot`` is the least time in seconds that a contender runs in a round."""

    cases: tuple[FuseCase, ...]
    members: tuple[int, ...]
    contenders: tuple[Contender, ...]
    rounds: int
    slot: float
    threads: int
    device: torch.device
    amp: torch.dtype | None = None


def pieces(settings: FuseSettings) -> int:
    """Return the number of pieces of work that ``run`` reports: one to prepare each contender, and one per round."""
    workloads = len(settings.cases) * len(settings.members)
    return workloads * len(settings.contenders) * (1 + settings.rounds)


def run(settings: FuseSettings, meter: Meter) -> Iterator[ModelResult]:
    """Compare the contenders on every model and number of members, one after the other."""
    for case in settings.cases:
        for members in settings.members:
            workload = Workload(case, members, settings.device, settings.amp)
            yield ModelResult(case.name, members, settings.threads, _compare(settings, workload, meter))


def _compare(settings: FuseSettings, workload: Workload, meter: Meter) -> tuple[Cell, ...]:
    where = f"{workload.case.name} x {workload.members}"
    # Compiled code of other workloads would count towards the limit of recompilations.
    torch.compiler.reset()
    expected = losses(serial.start(workload), AGREEMENT_STEPS)
    cells: dict[str, Cell] = {}
    steps = {}
    with ExitStack() as stack:
        for contender in settings.contenders:
            meter.say(f"{where}: preparing {contender.name}")
            prepared = prepare(contender, workload, expected)
            if isinstance(prepared, Cell):
                cells[contender.name] = prepared
                meter.advance(settings.rounds)
            else:
                stack.callback(prepared.close)
                steps[contender.name] = prepared.step
                cells[contender.name] = Cell(contender.name, cores=prepared.cores, note=prepared.note)
            meter.advance(1)
        meter.say(f"{where}: {settings.rounds} rounds")
        times = timing.interleave(
            steps,
            rounds=settings.rounds,
            slot=settings.slot,
            device=settings.device,
            tick=lambda: meter.advance(1),
        )
    return tuple(replace(cell, seconds=times.get(cell.contender, ())) for cell in cells.values())


def prepare(contender: Contender, workload: Workload, expected: Tensor) -> Running | Cell:
    """Start a contender and check its first losses; a Cell with the reason if one of the two fails."""
    if contender.one_rate:
        workload = replace(workload, one_rate=True)
        expected = losses(serial.start(workload), len(expected))
    try:
        running = contender.start(workload)
    except Exception as error:
        return Cell(contender.name, reason=reason_of(error))
    try:
        check_agreement(contender.name, expected, losses(running, len(expected)), workload.tolerance)
    except Disagreement as error:
        running.close()
        return Cell(contender.name, reason=str(error), disagrees=True)
    except Exception as error:
        running.close()
        return Cell(contender.name, reason=reason_of(error))
    return running


def reason_of(error: Exception) -> str:
    """Return the error in one line, for the notes under a table."""
    if isinstance(error, Unavailable):
        return str(error)
    return error_line(error)

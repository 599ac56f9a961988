"""Startup times of an array for every number of members: ``fuse``, the first step, the first compiled step.

Imports and the files that all arrays share on disk, native kernels and the compiler's header, are paid by a warm-up
that is not counted; torch's cache of compiled programs is empty before it. Each stage happens once, so that each is
timed once.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from rich.table import Table
from torch import Tensor
from torch._inductor.utils import fresh_cache

import hfusion as hf
from hfusion.bench import cases, models, serial
from hfusion.bench.comparison_table import Footnotes
from hfusion.bench.contenders import eager_step
from hfusion.bench.fuse_benchmark import FuseSettings
from hfusion.bench.progress import Meter
from hfusion.bench.workload import Workload
from hfusion.device.backend import backend

T = TypeVar("T")

WARM_UP = cases.FuseCase("warm-up", "", partial(models.mlp, 4, 4, 10), partial(cases.classified, 4, 4))
STAGES = {
    "fuse_ms": "fuse()",
    "first_ms": "first step",
    "second_ms": "second step",
    "compiled_ms": "first compiled step",
    "next_ms": "second compiled step",
}


@dataclass(frozen=True)
class StartupRow:
    """Milliseconds of each stage; the compiled ones are None if ``note`` says that the step is not compiled.

    ``fuse_ms``: hf.fuse. ``first_ms``: a step that captures, batches and verifies. ``second_ms``: the next one.
    ``compiled_ms``: the second call of hf.train_step, which compiles. ``next_ms``: the call after it.
    """

    model: str
    members: int
    fuse_ms: float
    first_ms: float
    second_ms: float
    compiled_ms: float | None
    next_ms: float | None
    note: str = ""


def pieces(settings: FuseSettings) -> int:
    """Return the number of pieces of work that ``run`` reports."""
    return len(settings.cases) * len(settings.members)


def run(settings: FuseSettings, meter: Meter) -> Iterator[StartupRow]:
    """One row for each model and number of members, after a warm-up."""
    with fresh_cache():
        meter.say("warming up")
        measure_startup(Workload(WARM_UP, 2, settings.device, settings.amp))
        for case in settings.cases:
            for members in settings.members:
                meter.say(f"{case.name} x {members}")
                yield measure_startup(Workload(case, members, settings.device, settings.amp))
                meter.advance(1)


def measure_startup(workload: Workload) -> StartupRow:
    """The stages of one array, each counted once."""
    torch.compiler.reset()
    gc.collect()
    batch = workload.batch()
    fused, fuse_ms = _clocked(workload, partial(hf.fuse, workload.models()))
    optimizer = hf.optim.Adam(serial.trained(fused), lr=list(workload.rates))
    eager = eager_step(workload, fused, optimizer)
    (_, first_ms), (_, second_ms) = (_clocked(workload, eager) for _ in range(2))

    train = hf.train_step(fused, workload.case.loss, optimizer, compile=True)

    def compiled() -> Tensor:
        with workload.autocast():
            return train(*batch)

    with warnings.catch_warnings():
        # The note says that it runs eagerly.
        warnings.simplefilter("ignore")
        compiled()
        (_, compiled_ms), (_, next_ms) = (_clocked(workload, compiled) for _ in range(2))
    note = "; ".join(f"eager: {row.why}" for row in train.report().rows if row.why)
    row = StartupRow(workload.case.name, workload.members, fuse_ms, first_ms, second_ms, compiled_ms, next_ms, note)
    return replace(row, compiled_ms=None, next_ms=None) if note else row


def _clocked(workload: Workload, call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of ``call``, and its milliseconds."""
    backend(workload.device).wait()
    start = time.perf_counter()
    result = call()
    backend(workload.device).wait()
    return result, 1e3 * (time.perf_counter() - start)


def table(rows: Sequence[StartupRow]) -> tuple[Table, list[str]]:
    """A row for each array, and footnotes."""
    shown = Table(title="milliseconds before an array trains")
    shown.add_column("model", no_wrap=True)
    for title in ("members", *STAGES.values()):
        shown.add_column(title, justify="right")
    footnotes = Footnotes()
    for row in rows:
        times = (getattr(row, name) for name in STAGES)
        cells = ("n/a" + footnotes.mark(row.note) if ms is None else f"{ms:,.1f}" for ms in times)
        shown.add_row(row.model, str(row.members), *cells)
    return shown, footnotes.lines()

"""Memory per member while a contender trains: the most that its tensors take during steps, after those that warm up.

Counted are the bytes that torch allocates from the making of the models on and has not freed: parameters, gradients,
the optimizer's state, activations, temporaries. On a CPU the profiler reports every allocation and release; on an
accelerator ``torch.accelerator.max_memory_allocated`` is read. Peak resident memory would tell of code, compilers and
malloc, too.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from hfusion.bench import serial
from hfusion.bench.comparison_table import Footnotes
from hfusion.bench.fuse_benchmark import AGREEMENT_STEPS, FuseSettings, prepare
from hfusion.bench.progress import Meter
from hfusion.bench.results import BASELINE, Cell
from hfusion.bench.workload import Contender, Running, Workload, losses
from hfusion.device.backend import backend

STEPS = 2
STEADY = "steady steps"
# What torch's allocator in this process does not see.
_PROCESSES = "its tensors are in other processes"
ELSEWHERE = dict.fromkeys(("processes", "processes-compiled", "processes-mps"), _PROCESSES) | {
    "jax": "its arrays are not torch's"
}


@dataclass(frozen=True)
class MemoryRow:
    """``bytes`` at the peak of steps of all members; without them, ``reason`` says why."""

    model: str
    members: int
    contender: str
    bytes: int | None = None
    bytes_per_member: int | None = None
    reason: str = ""
    disagrees: bool = False


def pieces(settings: FuseSettings) -> int:
    """Return the number of pieces of work that ``run`` reports."""
    return len(settings.cases) * len(settings.members) * len(settings.contenders)


def run(settings: FuseSettings, meter: Meter) -> Iterator[list[MemoryRow]]:
    """The rows of all contenders for one model and number of members after the other."""
    for case in settings.cases:
        for members in settings.members:
            workload = Workload(case, members, settings.device, settings.amp)
            yield _rows(settings.contenders, workload, meter)


def _rows(contenders: Sequence[Contender], workload: Workload, meter: Meter) -> list[MemoryRow]:
    torch.compiler.reset()
    expected = losses(serial.start(workload), AGREEMENT_STEPS)
    rows = []
    for contender in contenders:
        meter.say(f"{workload.case.name} x {workload.members}: {contender.name}")
        rows.append(_row(contender, workload, expected))
        meter.advance(1)
    return rows


def _row(contender: Contender, workload: Workload, expected: Tensor) -> MemoryRow:
    head = (workload.case.name, workload.members, contender.name)
    if contender.name in ELSEWHERE:
        return MemoryRow(*head, reason=ELSEWHERE[contender.name])
    gc.collect()
    prepared, peak = _counted(workload.device, lambda: prepare(contender, workload, expected))
    if isinstance(prepared, Cell):
        return MemoryRow(*head, reason=prepared.reason, disagrees=prepared.disagrees)
    prepared.close()
    return MemoryRow(*head, bytes=peak, bytes_per_member=round(peak / workload.members))


Prepare = Callable[[], Running | Cell]


def _counted(device: torch.device, start: Prepare) -> tuple[Running | Cell, int]:
    """Return the result of ``start``, and the peak of bytes that its steps allocated in addition to those before."""
    if device.type == "cpu":
        return _on_host(start)
    device_backend = backend(device)
    before = device_backend.allocated(lambda: None)
    prepared = start()
    most = device_backend.allocated(lambda: _steady(prepared) if isinstance(prepared, Running) else None)
    return prepared, most - before


def _on_host(start: Prepare) -> tuple[Running | Cell, int]:
    """The same by the profiler."""
    # Else it writes a line to stderr at each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        prepared = start()
        with record_function(STEADY):
            if isinstance(prepared, Running):
                _steady(prepared)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return prepared, peak_of(json.loads(path.read_text())["traceEvents"])


def _steady(running: Running) -> None:
    for _ in range(STEPS):
        running.step()


def peak_of(events: Sequence[Mapping[str, Any]]) -> int:
    """The most bytes alive from the beginning of the steady steps on, by the events of a Chrome trace."""
    (start,) = (event["ts"] for event in events if event.get("name") == STEADY and event.get("ph") == "X")
    changes = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    live: dict[int, int] = {}
    total = peak = 0
    for change in changes:
        size, address = change["args"]["Bytes"], change["args"]["Addr"]
        if change["ts"] >= start:
            peak = max(peak, total)
        # What was allocated before the profile is no part of it when it is freed.
        total += size if size > 0 else -live.pop(address, 0)
        if size > 0:
            live[address] = size
    return max(peak, total)


def table(rows: Sequence[MemoryRow], contenders: Sequence[str]) -> tuple[Table, list[str]]:
    """Return a row for each model and number of members: MiB per member, and the ratio to the serial loop's."""
    footnotes = Footnotes()
    shown = Table(title="MiB per member at the peak of a step", show_lines=True)
    shown.add_column("model", no_wrap=True)
    for title in ("members", *contenders):
        shown.add_column(title, justify="right")
    cells = {(row.model, row.members, row.contender): row for row in rows}
    for model, members in dict.fromkeys((row.model, row.members) for row in rows):
        serially = cells.get((model, members, BASELINE))
        texts = [_shown(cells[model, members, name], serially, footnotes) for name in contenders]
        shown.add_row(model, str(members), *texts)
    return shown, footnotes.lines()


def _shown(row: MemoryRow, serially: MemoryRow | None, footnotes: Footnotes) -> str:
    if row.bytes_per_member is None:
        return ("WRONG" if row.disagrees else "n/a") + footnotes.mark(f"{row.contender}: {row.reason}")
    text = f"{row.bytes_per_member / 2**20:.3g}"
    if serially is None or not serially.bytes_per_member:
        return text
    return f"{text}\n{row.bytes_per_member / serially.bytes_per_member:.2f}x"

"""Memory per member while a contender of ``fuse`` trains: the most that its tensors take during steps, warmed up.

    python benchmarks/memory.py --members 16 --contenders serial,hfusion,hfusion-compiled

Counted are the bytes that torch allocates from the making of the models on and has not freed. On a CPU the profiler
reports every allocation and release; on an accelerator ``torch.accelerator.max_memory_allocated`` is read.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hfusion.bench import fuse_benchmark, harness
from hfusion.bench.cases import CASES, Running, Workload, losses
from hfusion.bench.contenders import CONTENDERS, start_serial
from hfusion.bench.harness import Row

STEPS, STEADY = 2, "steady steps"


def rows_of(workload: Workload, contenders) -> Iterator[Row]:
    """Yield a row for each contender: ``bytes`` at the peak of steps of all members."""
    torch.compiler.reset()
    expected = losses(start_serial(workload), 4)
    for contender in contenders:
        harness.say(f"{workload.case.name} x {workload.members}: {contender.name}")
        if contender.name.startswith("processes"):
            head = {"model": workload.case.name, "members": workload.members, "contender": contender.name}
            yield head | {"reason": "its tensors are in other processes"}
            continue
        gc.collect()
        prepare = lambda: fuse_benchmark.prepare(contender, workload, expected)  # noqa: B023, E731
        (running, row), peak = (_on_host if workload.device.type == "cpu" else _on_device)(workload.device, prepare)
        if running is not None:
            running.close()
            row |= {"bytes": peak, "bytes_per_member": round(peak / workload.members)}
        yield row


Prepare = Callable[[], tuple[Running | None, Row]]


def _on_device(device: torch.device, prepare: Prepare):
    """Return the result of ``prepare``, and the peak of bytes that its steps allocated in addition to those before."""
    before = torch.accelerator.memory_allocated(device)
    prepared = prepare()
    torch.accelerator.reset_peak_memory_stats(device)
    _steady(prepared[0])
    return prepared, torch.accelerator.max_memory_allocated(device) - before


def _on_host(device: torch.device, prepare: Prepare):
    """Return the same by the profiler."""
    # Else it writes a line to stderr at each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        prepared = prepare()
        with record_function(STEADY):
            _steady(prepared[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return prepared, peak_of(json.loads(path.read_text())["traceEvents"])


def _steady(running: Running | None) -> None:
    for _ in range(STEPS if running else 0):
        running.step()


def peak_of(events: Sequence[Mapping[str, Any]]) -> int:
    """Return the most bytes alive from the beginning of the steady steps on, by the events of a Chrome trace."""
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


def run(options) -> Iterator[Row]:
    for case in options.models or CASES[: 1 if options.quick else None]:
        for members in options.members or ((4,) if options.quick else (4, 16, 64)):
            workload = Workload(case, members, options.device, fuse_benchmark.AMP.get(options.amp))
            yield from rows_of(workload, options.contenders or CONTENDERS)


def table(rows):
    values = {"MiB per member": lambda row: f"{row['bytes_per_member'] / 2**20:.3g}"}
    return harness.row_table("the peak of a step", rows, ("model", "members", "contender"), values)


BENCHMARK = replace(fuse_benchmark.BENCHMARK, about=__doc__, run=run, table=table)

if __name__ == "__main__":
    sys.exit(harness.run_command(BENCHMARK))

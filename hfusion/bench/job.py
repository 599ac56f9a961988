"""What a whole short job takes, from the start of its process to its end: imports, capture, compilation, steps.

Each job runs in a process of its own, twice: with empty caches, and with what the first run has left there. Members
that are trained one by one need no hfusion, whose import is not counted for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table

import hfusion as hf
from hfusion.bench import serial
from hfusion.bench.cases import CASES
from hfusion.bench.fuse import FuseSettings
from hfusion.bench.progress import Meter
from hfusion.bench.workload import Workload

# Steps of which the serial loop makes in some ten seconds with 16 members; of others as of the last.
STEPS = {"mlp-small": 300, "cnn": 30, "transformer": 60}
DEFAULT_STEPS = 60

ABOUT = {
    "serial": "one member after the other, eager, torch.optim.Adam",
    "hfusion": "hf.train_step(compile=False)",
    "train-step": "hf.train_step",
    "background": 'hf.train_step(compile="background")',
}

_CHILD = """
import time
import torch
start = time.perf_counter()
from hfusion.bench import job
job.work({arguments!r}, time.perf_counter() - start)
"""


@dataclass(frozen=True)
class JobRow:
    """Seconds of ``steps`` steps of all members in a process of their own, and where they do not end, why."""

    model: str
    members: int
    steps: int
    way: str
    cold_s: float | None
    warm_s: float | None
    reason: str = ""


def pieces(settings: FuseSettings) -> int:
    """How many pieces of work ``run`` reports."""
    return len(settings.cases) * len(settings.members) * len(ABOUT)


def run(settings: FuseSettings, meter: Meter) -> Iterator[JobRow]:
    """A row for each model, number of members and way."""
    for case in settings.cases:
        for members in settings.members:
            for way in ABOUT:
                meter.say(f"{case.name} x {members}: {way}")
                yield once(case.name, members, way, STEPS.get(case.name, DEFAULT_STEPS), settings.threads)
                meter.advance(1)


def once(model: str, members: int, way: str, steps: int, threads: int) -> JobRow:
    """The job with empty caches, then with full ones."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = {name: os.path.join(folder, name) for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")}
        row = partial(JobRow, model, members, steps, way)
        try:
            cold, warm = (_process((model, members, way, steps, threads), places) for _ in range(2))
        except subprocess.CalledProcessError as error:
            return row(None, None, reason=str(error.stderr).strip().rpartition("\n")[2])
    return row(cold, warm)


def _process(arguments: tuple[object, ...], places: dict[str, str]) -> float:
    command = [sys.executable, "-c", _CHILD.format(arguments=arguments)]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **places})
    return time.perf_counter() - start - float(done.stdout.split()[-1])


def work(arguments: tuple[str, int, str, int, int], importing: float) -> None:
    """The job itself; prints the seconds that are not to be counted. ``importing``: those of importing hfusion."""
    model, members, way, steps, threads = arguments
    torch.set_num_threads(threads)
    case = next(case for case in CASES if case.name == model)
    workload = Workload(case, members, torch.device("cpu"))
    inputs, target = workload.batch()
    if way == "serial":
        loop = serial.SerialLoop.of(workload, range(members))
        for _ in range(steps):
            loop.step()
        print(importing)
        return
    fused = hf.fuse(workload.models())
    optimizer = hf.optim.Adam(serial.trained(fused), lr=list(workload.rates))
    modes: dict[str, bool | str] = {"hfusion": False, "train-step": True, "background": "background"}
    step = hf.train_step(fused, case.loss, optimizer, compile=modes[way])
    with warnings.catch_warnings():
        # What runs eagerly stands in the table of steps.
        warnings.simplefilter("ignore")
        for _ in range(steps):
            step(inputs, target)
    print(0.0)


def table(rows: Sequence[JobRow]) -> tuple[Table, list[str]]:
    """A row for each job, and footnotes."""
    shown = Table(title="seconds of a job, from the start of its process to its end")
    for title in ("model", "members", "steps", "way", "empty caches", "full caches"):
        shown.add_column(title, justify="left" if title in ("model", "way") else "right")
    for row in rows:
        times = ("n/a" if seconds is None else f"{seconds:.1f}" for seconds in (row.cold_s, row.warm_s))
        shown.add_row(row.model, str(row.members), str(row.steps), row.way, *times)
    notes = [f"{way}: {about}" for way, about in ABOUT.items()]
    return shown, [*notes, *(f"{row.model} x {row.members}, {row.way}: {row.reason}" for row in rows if row.reason)]

"""The sub-benchmark ``short``: jobs of some seconds, from the start of their process to its end.

What a user waits for includes imports, the capture and the compiler. So each job is a process of its own: the serial
loop; hfusion with cache folders that are empty; and with those that an earlier job has filled.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from hfusion.bench.progress import Meter

# Which the serial loop of 16 members does in some ten seconds on two cores of an AMD EPYC (third generation).
STEPS = {"mlp-small": 300, "cnn": 30, "transformer": 60}
MEMBERS = (16,)
ABOUT = {
    "serial": "the loop over members, each with an Adam of torch",
    "cold": "hf.train_step(..., steps=n) with empty caches",
    "warm": "the same with the caches that an earlier job has filled",
}
# Float32, after some hundred steps of Adam that round differently.
TOLERANCE = 0.05


@dataclass(frozen=True)
class ShortSettings:
    """``models`` are names of `STEPS`; every contender runs once in each of ``rounds``."""

    models: tuple[str, ...]
    members: tuple[int, ...]
    rounds: int
    threads: int


@dataclass(frozen=True)
class ShortRow:
    """One contender: medians of the wall time, and of processor times: of its process and those that it started, and
    of its process alone, which is what it waits for where a core is free for the others.

    ``beyond``: seconds more than the serial loop took in the same round, the median.
    """

    model: str
    members: int
    steps: int
    contender: str
    seconds: float
    cpu_seconds: float
    own_cpu_seconds: float
    beyond: float


class WrongJob(Exception):
    """A job failed, or gives other losses than the serial loop."""


@dataclass(frozen=True)
class JobTime:
    """What a job took, and its last losses."""

    seconds: float
    cpu_seconds: float
    own_cpu_seconds: float
    losses: tuple[float, ...]


def pieces(settings: ShortSettings) -> int:
    """How many pieces of work ``run`` reports."""
    return len(settings.models) * len(settings.members) * settings.rounds


def run(settings: ShortSettings, meter: Meter) -> Iterator[ShortRow]:
    """A row for each model, number of members and contender. Raises WrongJob."""
    for model in settings.models:
        for members in settings.members:
            rounds = []
            for number in range(settings.rounds):
                meter.say(f"{model} x {members}, round {number + 1}")
                rounds.append(_round(model, members, settings.threads))
                meter.advance(1)
            yield from _rows(model, members, rounds)


def _round(model: str, members: int, threads: int) -> dict[str, JobTime]:
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as filled:
        run_job(model, members, threads, "fill", filled)
        return {
            "serial": run_job(model, members, threads, "serial", empty),
            "cold": run_job(model, members, threads, "hfusion", empty),
            "warm": run_job(model, members, threads, "hfusion", filled),
        }


def run_job(model: str, members: int, threads: int, way: str, folder: str, steps: int | None = None) -> JobTime:
    """One process with its caches in ``folder``. Raises WrongJob if it fails."""
    count = STEPS[model] if steps is None else steps
    given = [model, str(members), str(count), str(threads), way]
    caches = {
        "XDG_CACHE_HOME": folder,
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "OMP_NUM_THREADS": str(threads),
    }
    before, began = _processor_time(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hfusion.bench.short_job", *given],
        env={**os.environ, **caches, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise WrongJob(f"{way} of {model}: {done.stderr.strip().rpartition(chr(10))[2]}")
    losses, own = done.stdout.splitlines()[-2:]
    return JobTime(seconds, _processor_time() - before, float(own), tuple(map(float, losses.split())))


def _processor_time() -> float:
    """Of the processes that have ended; POSIX alone tells it."""
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _rows(model: str, members: int, rounds: Sequence[Mapping[str, JobTime]]) -> Iterator[ShortRow]:
    for name in ABOUT:
        for one in rounds:
            check_losses(f"{name} of {model}", one["serial"].losses, one[name].losses)
        yield ShortRow(
            model,
            members,
            STEPS[model],
            name,
            statistics.median(one[name].seconds for one in rounds),
            statistics.median(one[name].cpu_seconds for one in rounds),
            statistics.median(one[name].own_cpu_seconds for one in rounds),
            statistics.median(one[name].seconds - one["serial"].seconds for one in rounds),
        )


def check_losses(name: str, expected: Sequence[float], found: Sequence[float]) -> None:
    """Raise WrongJob where a member ends elsewhere than alone."""
    ours, theirs = (torch.tensor(values, dtype=torch.float64) for values in (found, expected))
    if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE):
        raise WrongJob(f"{name} ends with the losses {[*found]}, trained alone {[*expected]}")


def table(rows: Sequence[ShortRow]) -> Table:
    """A line for each job."""
    shown = Table(title="seconds from the start of a process to its end")
    shown.add_column("model", no_wrap=True)
    for title in ("members", "steps", "contender", "seconds", "processor", "own", "beyond serial"):
        shown.add_column(title, justify="left" if title == "contender" else "right")
    for row in rows:
        times = (f"{row.seconds:.1f}", f"{row.cpu_seconds:.1f}", f"{row.own_cpu_seconds:.1f}", f"{row.beyond:+.1f}")
        shown.add_row(row.model, str(row.members), str(row.steps), row.contender, *times)
    return shown

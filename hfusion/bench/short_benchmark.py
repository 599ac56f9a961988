"""The sub-benchmark ``short``: jobs of some seconds, from the start of their process to its end.

A user also waits for imports, the capture and the compiler. So each job is a process of its own: the serial loop,
whose processes are not charged for the import of hfusion; and hfusion's modes, with empty cache folders, and with
folders that a compiling job has filled.
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

from hfusion.bench.comparison_table import Footnotes
from hfusion.bench.progress import Meter
from hfusion.bench.results import BASELINE
from hfusion.bench.timing import children_cpu_seconds

# Which the serial loop of 16 members does in some ten seconds on two cores of an AMD EPYC (third generation).
STEPS = {"mlp-small": 300, "cnn": 30, "transformer": 60}
DEFAULT_STEPS = 60
MEMBERS = (16,)
# Float32, after some hundred steps of Adam that round differently.
TOLERANCE = 0.05

_CHILD = """
import sys, time
import torch
began = time.perf_counter(), time.process_time()
from hfusion.bench import short_job
short_job.main(sys.argv[1:], began)
"""


@dataclass(frozen=True)
class ShortContender:
    """``variant``: the last argument of `short_job`. ``warm``: with caches that are full."""

    name: str
    about: str
    variant: str
    warm: bool = False


_VARIANTS = {
    "eager": "hf.train_step(compile=False)",
    "compiled": "hf.train_step(compile=True)",
    "background": 'hf.train_step(compile="background")',
    "steps": "hf.train_step(steps=n)",
}
FILLER = "compiled-cold"
CONTENDERS = (
    ShortContender(BASELINE, "the loop over members, each with an Adam of torch", BASELINE),
    *(
        ShortContender(
            f"{variant}-{'warm' if warm else 'cold'}", f"{call}, {'full' if warm else 'empty'} caches", variant, warm
        )
        for variant, call in _VARIANTS.items()
        for warm in (False, True)
    ),
)


@dataclass(frozen=True)
class ShortSettings:
    """``models`` are names of cases of ``fuse``; every contender runs once in each of ``rounds``."""

    models: tuple[str, ...]
    members: tuple[int, ...]
    contenders: tuple[ShortContender, ...]
    rounds: int
    threads: int


@dataclass(frozen=True)
class ShortRow:
    """One contender: medians of wall time and processor times.

    Processor times are those of its process with its children, and of its process alone, for which the user waits if a
    core is free for the others. ``beyond``: seconds more than the serial loop took in the same round, the median.
    Without times, ``reason`` says why; ``disagrees``: its last losses differ from those of the serial loop.
    """

    model: str
    members: int
    steps: int
    contender: str
    seconds: float | None = None
    cpu_seconds: float | None = None
    own_cpu_seconds: float | None = None
    beyond: float | None = None
    reason: str = ""
    disagrees: bool = False


class WrongJob(Exception):
    """A job failed, or gives other losses than the serial loop."""


@dataclass(frozen=True)
class JobTime:
    """The times of a job and its last losses, or why it failed."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    own_cpu_seconds: float = 0.0
    losses: tuple[float, ...] = ()
    reason: str = ""


def pieces(settings: ShortSettings) -> int:
    """Return the number of pieces of work that ``run`` reports."""
    return len(settings.models) * len(settings.members) * settings.rounds


def run(settings: ShortSettings, meter: Meter) -> Iterator[ShortRow]:
    """A row for each model, number of members and contender."""
    for model in settings.models:
        for members in settings.members:
            rounds = []
            for number in range(settings.rounds):
                meter.say(f"{model} x {members}, round {number + 1}")
                rounds.append(_round(settings, model, members))
                meter.advance(1)
            for contender in settings.contenders:
                yield row(model, members, contender.name, rounds)


def _round(settings: ShortSettings, model: str, members: int) -> dict[str, JobTime]:
    """Return times by contender. The one that fills the caches runs first; the serial loop always runs."""
    chosen = {contender.name: contender for contender in (*CONTENDERS[:1], *settings.contenders)}
    times = {}
    with tempfile.TemporaryDirectory() as filled:
        if FILLER in chosen or any(contender.warm for contender in chosen.values()):
            times[FILLER] = _job(model, members, settings.threads, "compiled", filled)
        for name, contender in chosen.items():
            if name not in times:
                with tempfile.TemporaryDirectory() as empty:
                    folder = filled if contender.warm else empty
                    times[name] = _job(model, members, settings.threads, contender.variant, folder)
    return times


def _job(model: str, members: int, threads: int, variant: str, folder: str) -> JobTime:
    try:
        return run_job(model, members, threads, variant, folder)
    except WrongJob as error:
        return JobTime(reason=str(error))


def run_job(model: str, members: int, threads: int, variant: str, folder: str, steps: int | None = None) -> JobTime:
    """One process with its caches in ``folder``. Raises WrongJob if it fails."""
    arguments = [model, str(members), str(steps or _steps(model)), str(threads), variant]
    caches = {"XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    before, began = children_cpu_seconds(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *arguments],
        env={**os.environ, **caches, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise WrongJob(f"{variant} of {model}: {done.stderr.strip().rpartition(chr(10))[2]}")
    losses, times = done.stdout.splitlines()[-2:]
    own_cpu, uncounted, uncounted_cpu = map(float, times.split())
    cpu = children_cpu_seconds() - before - uncounted_cpu
    return JobTime(seconds - uncounted, cpu, own_cpu - uncounted_cpu, tuple(map(float, losses.split())))


def _steps(model: str) -> int:
    return STEPS.get(model, DEFAULT_STEPS)


def row(model: str, members: int, name: str, rounds: Sequence[Mapping[str, JobTime]]) -> ShortRow:
    """Return the medians of contender ``name``, or the reason why it has none."""
    key = (model, members, _steps(model), name)
    jobs, alone = [job_times[name] for job_times in rounds], [job_times[BASELINE] for job_times in rounds]
    failed = next((job.reason for job in (*jobs, *alone) if job.reason), "")
    if failed:
        return ShortRow(*key, reason=failed)
    try:
        for job, other in zip(jobs, alone, strict=True):
            check_losses(f"{name} of {model}", other.losses, job.losses)
    except WrongJob as error:
        return ShortRow(*key, reason=str(error), disagrees=True)
    return ShortRow(
        *key,
        seconds=statistics.median(job.seconds for job in jobs),
        cpu_seconds=statistics.median(job.cpu_seconds for job in jobs),
        own_cpu_seconds=statistics.median(job.own_cpu_seconds for job in jobs),
        beyond=statistics.median(job.seconds - other.seconds for job, other in zip(jobs, alone, strict=True)),
    )


def check_losses(name: str, expected: Sequence[float], actual: Sequence[float]) -> None:
    """Raise WrongJob where a member ends elsewhere than alone."""
    actual_tensor, expected_tensor = (torch.tensor(values, dtype=torch.float64) for values in (actual, expected))
    if actual_tensor.shape != expected_tensor.shape or not torch.allclose(
        actual_tensor, expected_tensor, rtol=TOLERANCE, atol=TOLERANCE
    ):
        raise WrongJob(f"{name} ends with the losses {[*actual]}, trained alone {[*expected]}")


def table(rows: Sequence[ShortRow]) -> tuple[Table, list[str]]:
    """A line for each job, and footnotes."""
    shown = Table(title="seconds from the start of a process to its end")
    shown.add_column("model", no_wrap=True)
    for title in ("members", "steps", "contender", "seconds", "processor", "own", "beyond serial"):
        shown.add_column(title, justify="left" if title == "contender" else "right")
    footnotes = Footnotes()
    for row in rows:
        word = ("WRONG" if row.disagrees else "n/a") + footnotes.mark(row.reason)
        times = [_shown(value, word) for value in (row.seconds, row.cpu_seconds, row.own_cpu_seconds)]
        shown.add_row(
            row.model, str(row.members), str(row.steps), row.contender, *times, _shown(row.beyond, word, sign="+")
        )
    names = {row.contender for row in rows}
    about = [f"{contender.name}: {contender.about}" for contender in CONTENDERS if contender.name in names]
    return shown, [*about, *footnotes.lines()]


def _shown(seconds: float | None, word: str, sign: str = "") -> str:
    return word if seconds is None else f"{seconds:{sign}.1f}"

"""Jobs of some seconds, from the start of their process to its end (``short``), with cold and warm caches.

A user also waits for imports, the capture and the compiler. So each job is a process of its own: the serial loop,
whose processes are not charged for the import of hfusion; and hfusion's modes, with empty cache folders, and with
folders that a compiling job has filled.
"""

from __future__ import annotations

import argparse
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

from hfusion.bench import harness
from hfusion.bench.cases import CASES
from hfusion.bench.harness import Benchmark, Row

# Which the serial loop of 16 members does in some ten seconds on two cores of an AMD EPYC (third generation).
STEPS = {"mlp-small": 300, "cnn": 30, "transformer": 60}
DEFAULT_STEPS = 60
# Float32, after some hundred steps of Adam that round differently.
_TOLERANCE = 0.05
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
    "default": "hf.train_step()",
}
BASELINE, FILLER = "serial", "compiled-cold"
CONTENDERS = (
    ShortContender(BASELINE, "the loop over members, each with an Adam of torch", BASELINE),
    *(
        ShortContender(f"{variant}-{state}", f"{call}, {caches} caches", variant, state == "warm")
        for variant, call in _VARIANTS.items()
        for state, caches in (("cold", "empty"), ("warm", "full"))
    ),
)


@dataclass(frozen=True)
class JobTime:
    """Seconds of a job: wall time, processor time with its children, and without them; and its last losses."""

    seconds: float
    cpu_seconds: float
    own_cpu_seconds: float
    losses: tuple[float, ...]


Job = JobTime | str
"""The times of a job, or why it has failed."""


def run_job(model: str, members: int, steps: int, threads: int, variant: str, folder: str) -> Job:
    """Run one process with its caches in ``folder``."""
    command = [sys.executable, "-c", _CHILD, model, *map(str, (members, steps, threads)), variant]
    caches = {"XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    environment = {**os.environ, **caches, "OMP_NUM_THREADS": str(threads)}
    before, began = harness.children_cpu_seconds(), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        return f"{variant} of {model}: {done.stderr.strip().rpartition(chr(10))[2]}"
    losses, times = done.stdout.splitlines()[-2:]
    own_cpu, uncounted, uncounted_cpu = map(float, times.split())
    cpu = harness.children_cpu_seconds() - before - uncounted_cpu
    return JobTime(seconds - uncounted, cpu, own_cpu - uncounted_cpu, tuple(map(float, losses.split())))


def run_round(
    contenders: Sequence[ShortContender], model: str, members: int, steps: int, threads: int
) -> dict[str, Job]:
    """Run each contender once. The one that fills the caches runs first; the serial loop always runs."""
    chosen = {contender.name: contender for contender in (*CONTENDERS[:1], *contenders)}
    if any(contender.warm for contender in contenders) or FILLER in chosen:
        chosen = {contender.name: contender for contender in CONTENDERS if contender.name == FILLER} | chosen
    times = {}
    with tempfile.TemporaryDirectory() as filled:
        for name, contender in chosen.items():
            with tempfile.TemporaryDirectory() as empty:
                folder = filled if contender.warm or name == FILLER else empty
                times[name] = run_job(model, members, steps, threads, contender.variant, folder)
    return times


def row_of(name: str, rounds: Sequence[Mapping[str, Job]]) -> Row:
    """Return the medians of a contender, or why there are none. ``beyond``: seconds more than the serial loop's."""
    pairs = [(each[name], each[BASELINE]) for each in rounds]
    good = [(job, alone) for job, alone in pairs if isinstance(job, JobTime) and isinstance(alone, JobTime)]
    failed = [job for pair in pairs for job in pair if isinstance(job, str)]
    if failed:
        return {"reason": failed[0]}
    for job, alone in good:
        actual, expected = (torch.tensor(each.losses, dtype=torch.float64) for each in (job, alone))
        if actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            reason = f"{name} ends with the losses {[*job.losses]}, trained alone {[*alone.losses]}"
            return {"reason": reason, "disagrees": True}
    return {
        "seconds": statistics.median(job.seconds for job, _ in good),
        "cpu_seconds": statistics.median(job.cpu_seconds for job, _ in good),
        "own_cpu_seconds": statistics.median(job.own_cpu_seconds for job, _ in good),
        "beyond": statistics.median(job.seconds - alone.seconds for job, alone in good),
        "reason": "",
    }


def _run(options: argparse.Namespace) -> Iterator[Row]:
    models = [case.name for case in options.models] if options.models else [*STEPS][: 1 if options.quick else None]
    contenders = options.contenders or CONTENDERS
    for model in models:
        steps = options.steps or STEPS.get(model, DEFAULT_STEPS)
        for members in options.members or (16,):
            rounds = []
            for number in range(options.repeats or (1 if options.quick else 3)):
                harness.say(f"{model} x {members}, round {number + 1}")
                rounds.append(run_round(contenders, model, members, steps, options.threads))
            for contender in contenders:
                key = {"model": model, "members": members, "steps": steps, "contender": contender.name}
                yield key | row_of(contender.name, rounds)


def _table(rows: Sequence[Row]) -> Table:
    return harness.row_table(
        "seconds from the start of a process to its end",
        rows,
        ("model", "members", "steps", "contender"),
        {
            "seconds": lambda row: harness.number(row["seconds"]),
            "processor": lambda row: harness.number(row["cpu_seconds"]),
            "own": lambda row: harness.number(row["own_cpu_seconds"]),
            "beyond serial": lambda row: f"{row['beyond']:+.1f}",
        },
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=harness.count, help="of each job, instead of about ten seconds of the loop")


BENCHMARK = Benchmark(__doc__, _run, _table, {"models": CASES, "contenders": CONTENDERS}, True, _options)

"""hf.sweep with default arguments against plain torch, on spaces of unlike and of like models, in whole commands.

    python benchmarks/search_spaces.py                                     # three spaces, three sizes each
    python benchmarks/search_spaces.py --spaces twins --cells 24x15        # one size: trials x epochs

Every search is a process of its own, from search_job.py. Before the clock starts, each cell is searched once in float64
without random masks, and every contender must report the values of the loop. This also fills the caches of the machine;
each timed process gets a copy of them, so that it compiles its own programs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import search_job
from search_job import SearchJob, SearchReport

import hfusion
from hfusion.bench import harness
from hfusion.bench.cases import Contender
from hfusion.bench.harness import Benchmark, Row
from hfusion.device.native import cores

LOOP, OURS = "loop", "hfusion"
CONTENDERS = (
    Contender(LOOP, "study.optimize: one trial after another in plain torch with the fused Adam, on all cores", None),
    Contender("processes", "a worker process for each core, each trial in plain torch on one thread", None),
    Contender(OURS, "hf.sweep with its default arguments", None),
)
SPACES = ("unlike", "widths", "twins")
TOLERANCE = 1e-9


class SearchFailed(Exception):
    """A search ended with an error."""


@dataclass(frozen=True)
class CommandTime:
    """The times of a command, and its report."""

    seconds: float
    cpu_seconds: float
    report: SearchReport


def run_command(job: SearchJob, caches: Path) -> CommandTime:
    """Run one process, from its start to its end, with its caches in a folder. Raises SearchFailed."""
    package = str(Path(hfusion.__file__).parents[1])
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": str(job.cores),
        "XDG_CACHE_HOME": str(caches),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    # With -P, files next to a script that is run by its path do not shadow other packages.
    command = [sys.executable, "-P", search_job.__file__, json.dumps(asdict(job))]
    cpu_started, started = harness.children_cpu_seconds(), time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    seconds, cpu_seconds = time.perf_counter() - started, harness.children_cpu_seconds() - cpu_started
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise SearchFailed(f"{job.contender} on {job.space} ended with status {done.returncode}: {last}")
    return CommandTime(seconds, cpu_seconds, SearchReport(**json.loads(done.stdout.splitlines()[-1])))


def largest_difference(report: SearchReport, alone: SearchReport) -> float:
    """Return the largest relative difference of values from those of separate trials; infinite if trials differ."""
    lengths = [len(values) for values in report.values]
    if report.params != alone.params or lengths != [len(values) for values in alone.values]:
        return math.inf
    pairs = [pair for both in zip(report.values, alone.values, strict=True) for pair in zip(*both, strict=True)]
    differences = [abs(value - expected) / abs(expected) for value, expected in pairs]
    # A value that is no number compares with nothing.
    return max((math.inf if math.isnan(value) else value for value in differences), default=0.0)


def check(job: SearchJob, caches: Path) -> dict[str, Row]:
    """Search in float64 by every contender; the rows of those that fail or find other values have a reason."""
    caches.mkdir()
    rows: dict[str, Row] = {}
    alone = None
    for name in (contender.name for contender in CONTENDERS):
        harness.say(f"{job.space}, {job.trials} x {job.epochs}, values of {name}")
        rows[name] = {"space": job.space, "trials": job.trials, "epochs": job.epochs, "contender": name, "reason": ""}
        try:
            report = run_command(replace(job, contender=name, exact=True), caches).report
            alone = alone or report
            difference = largest_difference(report, alone)
            if difference > TOLERANCE:
                rows[name] |= {"reason": f"a value differs from the loop's by {difference:.1e}", "disagrees": True}
        except SearchFailed as error:
            rows[name]["reason"] = str(error)
    return rows


def search_cell(job: SearchJob, rounds: int) -> Iterator[Row]:
    """Yield the rows of one space and size: medians over the rounds, in which contenders take turns.

    ``seconds`` and ``cpu_seconds`` are of the whole command, imports and worker processes included; ``search_seconds``
    of what follows the imports. ``versus_best`` of hf.sweep is its speed-up over the faster rival.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches, copied = Path(folder, "caches"), Path(folder, "copied")
        rows = check(job, caches)
        times: dict[str, list[CommandTime]] = {name: [] for name, row in rows.items() if not row["reason"]}
        for number in range(rounds):
            for name in [name for name in times if not rows[name]["reason"]]:
                harness.say(f"{job.space}, {job.trials} x {job.epochs}, round {number + 1}, {name}")
                shutil.copytree(caches, copied)
                try:
                    times[name].append(run_command(replace(job, contender=name), copied))
                except SearchFailed as error:
                    rows[name]["reason"] = str(error)
                shutil.rmtree(copied)
    walls = {name: [each.seconds for each in found] for name, found in times.items() if not rows[name]["reason"]}
    for name, row in rows.items():
        if name in walls:
            row["seconds"] = statistics.median(walls[name])
            row["spread"] = harness.spread(walls[name])
            row["cpu_seconds"] = statistics.median(each.cpu_seconds for each in times[name])
            row["search_seconds"] = statistics.median(each.report.seconds for each in times[name])
            row["best"] = statistics.median(min(v[-1] for v in each.report.values) for each in times[name])
            row["speedup"] = harness.speedup(walls[LOOP], walls[name]) if LOOP in walls else None
            rivals = {each: harness.speedup(walls[each], walls[name]) for each in walls if each != OURS}
            if name == OURS and rivals:
                row["best_rival"] = min(rivals, key=lambda each: rivals[each])
                row["versus_best"] = rivals[row["best_rival"]]
        yield row


def run(options) -> Iterator[Row]:
    for space in options.spaces.split(","):
        for cell in (options.cells or ("6x1" if options.quick else "24x3,24x15,96x5")).split(","):
            trials, epochs = map(int, cell.split("x"))
            job = SearchJob(LOOP, space, trials, epochs, cores(), minibatches=options.minibatches)
            yield from search_cell(job, options.repeats or (1 if options.quick else 3))


def table(rows):
    values = {
        "seconds": lambda row: f"{row['seconds']:.1f}",
        "spread": lambda row: f"{row['spread']:.0%}",
        "processor": lambda row: f"{row['cpu_seconds']:.1f}",
        "after imports": lambda row: f"{row['search_seconds']:.1f}",
        "best": lambda row: f"{row['best']:.4f}",
        "speed-up": lambda row: harness.factor(row["speedup"]),
        "vs best rival": lambda row: harness.factor(row.get("versus_best")),
    }
    labels = ("space", "trials", "epochs", "contender")
    return harness.row_table("a search, whole commands: seconds, and speed-up over the loop", rows, labels, values)


def add_options(parser) -> None:
    parser.add_argument("--spaces", default=",".join(SPACES), help="of unlike, widths, twins")
    parser.add_argument("--cells", metavar="24x3,96x5", help="trials x epochs (default all three)")
    parser.add_argument("--minibatches", type=int, default=30, help="of an epoch")


BENCHMARK = Benchmark(__doc__, run, table, {"contenders of all": CONTENDERS}, add_options=add_options)

if __name__ == "__main__":
    sys.exit(harness.run_command(BENCHMARK))

"""``sweep --space``: hf.sweep with default arguments against plain torch, on spaces of unlike and of like models.

Every search is a whole command, a process of its own, from `search_job`. Before the clock starts, each cell is searched
once in float64 without random masks, and every contender must report the values of the loop. This also fills the caches
of the machine; each timed process gets a copy of them, so that it compiles its own programs.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

import hfusion
from hfusion.bench import search_job, timing
from hfusion.bench.comparison_table import Footnotes, factor
from hfusion.bench.progress import Meter
from hfusion.bench.search_job import SearchJob, SearchReport

LOOP, OURS = "loop", "hfusion"
ABOUT = {
    LOOP: "study.optimize: one trial after another in plain torch with the fused Adam, torch on all cores",
    "processes": "a worker process for each core, each trial in plain torch with the fused Adam on one thread",
    OURS: "hf.sweep with its default arguments",
}
SPACES = {
    "unlike": "n_layers 1 to 3, n_units 4 to 128 of each, dropout, lr: Optuna's PyTorch example",
    "widths": "two hidden layers of one of four widths, dropout, lr",
    "twins": "two hidden layers of 64, dropout, lr",
}
TOLERANCE = 1e-9


@dataclass(frozen=True)
class SearchCell:
    """A size of search: trials, and epochs of each."""

    trials: int
    epochs: int


CELLS = (SearchCell(24, 3), SearchCell(24, 15), SearchCell(96, 5))
QUICK_CELLS = (SearchCell(6, 1),)


@dataclass(frozen=True)
class SpaceSettings:
    """Settings: every contender runs once in each of ``rounds``, on ``cores`` cores, for each space and cell."""

    spaces: tuple[str, ...]
    cells: tuple[SearchCell, ...]
    rounds: int
    cores: int
    minibatches: int = 30


@dataclass(frozen=True)
class SpaceRow:
    """One contender on one space and cell; medians over the rounds.

    Attributes:
        seconds: wall time of the whole command, imports included.
        spread: quartile distance of ``seconds`` over their median.
        cpu_seconds: processor time of the whole command, worker processes included.
        search_seconds: wall time after the imports.
        search_cpu_seconds: processor time after the imports.
        speedup: wall time of the loop's command over this one's.
        cpu_speedup: the same of processor time.
        versus_best: of hf.sweep alone, its wall speed-up over the rival that is faster.
        best_rival: the name of that rival.
        best: the lowest value of a trial after its last epoch, a median too.
        largest_difference: relative, of any reported value to the loop's, in float64.
        reason: why there are no times.
        disagrees: values differ from the loop's.
    """

    space: str
    trials: int
    epochs: int
    contender: str
    seconds: float | None = None
    spread: float | None = None
    cpu_seconds: float | None = None
    search_seconds: float | None = None
    search_cpu_seconds: float | None = None
    speedup: float | None = None
    cpu_speedup: float | None = None
    versus_best: float | None = None
    best_rival: str = ""
    best: float | None = None
    largest_difference: float | None = None
    reason: str = ""
    disagrees: bool = False


class SearchFailed(Exception):
    """A search ended with an error."""


@dataclass(frozen=True)
class CommandTime:
    """The times of a command, and its report."""

    seconds: float
    cpu_seconds: float
    report: SearchReport


@dataclass(frozen=True)
class Checked:
    """The contenders of a cell: the largest relative difference of their values from the loop's, or the fault."""

    differences: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def timed(self) -> list[str]:
        """Contenders that may be timed: those whose values are the loop's."""
        return [name for name, difference in self.differences.items() if difference <= TOLERANCE]


def pieces(settings: SpaceSettings) -> int:
    """Return the number of pieces of work that ``run`` reports: a check and all rounds for each cell."""
    return len(settings.spaces) * len(settings.cells) * (1 + settings.rounds)


def run(settings: SpaceSettings, meter: Meter) -> Iterator[SpaceRow]:
    """A row for each space, cell and contender."""
    for space in settings.spaces:
        for cell in settings.cells:
            job = SearchJob(LOOP, space, cell.trials, cell.epochs, settings.cores, minibatches=settings.minibatches)
            yield from _run_cell(job, settings.rounds, meter)


def _run_cell(job: SearchJob, rounds: int, meter: Meter) -> Iterator[SpaceRow]:
    title = f"{job.space}, {job.trials} x {job.epochs}"
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder, "caches")
        meter.say(f"{title}, values")
        checked = check(job, caches)
        meter.advance(1)
        times: dict[str, list[CommandTime]] = {name: [] for name in checked.timed()}
        reasons = dict(checked.reasons)
        for number in range(rounds):
            meter.say(f"{title}, round {number + 1}")
            for name in [name for name in times if name not in reasons]:
                copied = Path(folder, "copied")
                shutil.copytree(caches, copied)
                try:
                    times[name].append(run_command(replace(job, contender=name), copied))
                except SearchFailed as error:
                    reasons[name] = str(error)
                finally:
                    shutil.rmtree(copied)
            meter.advance(1)
    complete = {name: commands for name, commands in times.items() if name not in reasons}
    yield from cell_rows(job, Checked(checked.differences, reasons), complete)


def check(job: SearchJob, caches: Path) -> Checked:
    """Search in float64 by every contender, and compare all values with the loop's."""
    caches.mkdir(exist_ok=True)
    reports: dict[str, SearchReport] = {}
    reasons = {}
    for name in ABOUT:
        try:
            reports[name] = run_command(replace(job, contender=name, exact=True), caches).report
        except SearchFailed as error:
            reasons[name] = str(error)
    if LOOP not in reports:
        without = dict.fromkeys(reports, f"not compared, as the loop failed: {reasons[LOOP]}")
        return Checked({}, reasons | without)
    differences = {name: largest_difference(report, reports[LOOP]) for name, report in reports.items()}
    wrong = {
        name: f"{name} on {job.space}, {job.trials} x {job.epochs}: a value differs from the loop's by {difference:.1e}"
        for name, difference in differences.items()
        if difference > TOLERANCE
    }
    return Checked(differences, reasons | wrong)


def largest_difference(report: SearchReport, alone: SearchReport) -> float:
    """Return the largest relative difference of values from those of separate trials; infinite if trials differ."""
    lengths = [len(values) for values in report.values]
    if report.params != alone.params or lengths != [len(values) for values in alone.values]:
        return math.inf
    pairs = [
        pair
        for values, expected in zip(report.values, alone.values, strict=True)
        for pair in zip(values, expected, strict=True)
    ]
    differences = [abs(value - expected) / abs(expected) for value, expected in pairs]
    # A value that is no number compares with nothing.
    return max((math.inf if math.isnan(value) else value for value in differences), default=0.0)


def run_command(job: SearchJob, caches: Path) -> CommandTime:
    """One process, from its start to its end, with its caches in a folder. Raises SearchFailed."""
    package = str(Path(hfusion.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    environment = {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": str(job.cores),
        "XDG_CACHE_HOME": str(caches),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    # With -P, files next to a script that is run by its path do not shadow other packages.
    command = [sys.executable, "-P", search_job.__file__, json.dumps(asdict(job))]
    cpu_started, started = timing.children_cpu_seconds(), time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    seconds, cpu_seconds = time.perf_counter() - started, timing.children_cpu_seconds() - cpu_started
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise SearchFailed(f"{job.contender} on {job.space} ended with status {done.returncode}: {last}")
    return CommandTime(seconds, cpu_seconds, SearchReport(**json.loads(done.stdout.splitlines()[-1])))


def cell_rows(job: SearchJob, checked: Checked, times: Mapping[str, Sequence[CommandTime]]) -> list[SpaceRow]:
    """The rows of one cell, from the times of each contender in each round."""
    return [_row(job, name, checked, times) for name in ABOUT]


def _row(job: SearchJob, name: str, checked: Checked, times: Mapping[str, Sequence[CommandTime]]) -> SpaceRow:
    difference = checked.differences.get(name)
    disagrees = difference is not None and difference > TOLERANCE
    row = SpaceRow(
        job.space,
        job.trials,
        job.epochs,
        name,
        # JSON has no infinity.
        largest_difference=difference if difference is not None and math.isfinite(difference) else None,
        reason=checked.reasons.get(name, ""),
        disagrees=disagrees,
    )
    if name not in times:
        return row
    commands = times[name]
    wall = [command.seconds for command in commands]
    cpu = [command.cpu_seconds for command in commands]
    row = replace(
        row,
        seconds=statistics.median(wall),
        spread=timing.spread(wall),
        cpu_seconds=statistics.median(cpu),
        search_seconds=statistics.median(command.report.seconds for command in commands),
        search_cpu_seconds=statistics.median(command.report.cpu_seconds for command in commands),
        best=statistics.median(min(values[-1] for values in command.report.values) for command in commands),
    )
    if LOOP in times:
        row = replace(
            row,
            speedup=timing.speedup([command.seconds for command in times[LOOP]], wall),
            cpu_speedup=timing.speedup([command.cpu_seconds for command in times[LOOP]], cpu),
        )
    rivals = {
        rival: timing.speedup([command.seconds for command in others], wall)
        for rival, others in times.items()
        if rival != OURS
    }
    if name != OURS or not rivals:
        return row
    best = min(rivals, key=lambda rival: rivals[rival])
    return replace(row, versus_best=rivals[best], best_rival=best)


def table(rows: Sequence[SpaceRow]) -> tuple[Table, list[str]]:
    """A line for each row, and footnotes."""
    shown = Table(title="a search, whole commands: seconds, and speed-up over the loop")
    for heading in ("space", "trials x epochs", "contender"):
        shown.add_column(heading, no_wrap=True)
    for heading in (
        "seconds",
        "spread",
        "processor",
        "after imports",
        "best",
        "speed-up",
        "of processor",
        "vs best rival",
    ):
        shown.add_column(heading, justify="right")
    footnotes = Footnotes()
    for row in rows:
        labels = (row.space, f"{row.trials} x {row.epochs}", row.contender)
        if row.seconds is None or row.spread is None:
            shown.add_row(*labels, ("WRONG" if row.disagrees else "n/a") + footnotes.mark(row.reason))
            continue
        times = [f"{row.seconds:.1f}", f"{row.spread:.0%}", f"{row.cpu_seconds:.1f}", f"{row.search_seconds:.1f}"]
        times.append(f"{row.best:.4f}")
        versus = _factor(row.versus_best)
        if row.best_rival:
            versus.append(f" {row.best_rival}", style="default")
        shown.add_row(*labels, *times, _factor(row.speedup), _factor(row.cpu_speedup), versus)
    names = {row.contender for row in rows}
    about = [f"{name}: {text}" for name, text in ABOUT.items() if name in names]
    return shown, [*about, *footnotes.lines()]


def _factor(value: float | None) -> Text:
    return Text("") if value is None else factor(value)

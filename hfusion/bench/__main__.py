"""``python -m hfusion.bench NAME``: ``--list`` says which there are, ``--help`` what one takes."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from hfusion.bench import (
    comparison_table,
    foretold_benchmark,
    fuse_benchmark,
    memory_benchmark,
    optim_benchmark,
    plot,
    results,
    schedule_benchmark,
    search_spaces,
    shard_benchmark,
    shard_cases,
    shard_results,
    short_benchmark,
    startup_benchmark,
    sweep_benchmark,
    sweep_contenders,
    train_benchmark,
)
from hfusion.bench.cases import CASES
from hfusion.bench.command_line import (
    SEPARATE,
    SUB_BENCHMARKS,
    foretold_settings,
    fuse_settings,
    optim_settings,
    parse,
    schedule_settings,
    shard_settings,
    short_settings,
    space_settings,
    sweep_settings,
    train_settings,
)
from hfusion.bench.contenders import CONTENDERS
from hfusion.bench.gpu_state import gpu_state
from hfusion.bench.machine_description import describe
from hfusion.bench.policies import COMPARED
from hfusion.bench.progress import meter

# A table of all contenders; a terminal is as wide as it is, a file or a pipe has no width.
WIDTH_WITHOUT_TERMINAL = 200

T = TypeVar("T")


def console() -> Console:
    """Return a console on stdout, wide enough for the table if stdout is no terminal."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)


def print_names(out: Console) -> None:
    """The sub-benchmarks, models and contenders, one line each."""
    sections = {
        "sub-benchmarks": SUB_BENCHMARKS | SEPARATE,
        "models of fuse": {case.name: case.about for case in CASES},
        "contenders of fuse": {contender.name: contender.about for contender in CONTENDERS},
        "cases of optim": {case.name: case.about for case in optim_benchmark.CASES},
        "contenders of optim": optim_benchmark.ABOUT,
        "cases of shard": {case.name: case.about for case in shard_cases.CASES},
        "contenders of shard": shard_results.ABOUT,
        "models of short": {name: f"{steps} steps" for name, steps in short_benchmark.STEPS.items()},
        "contenders of short": {contender.name: contender.about for contender in short_benchmark.CONTENDERS},
        "models of sweep": {case.name: case.about for case in sweep_benchmark.CASES},
        "contenders of sweep": {contender.name: contender.about for contender in sweep_contenders.CONTENDERS},
        "spaces of sweep": search_spaces.SPACES,
        "contenders of sweep --space": search_spaces.ABOUT,
        "policies of schedule": {policy.name: policy.about for policy in COMPARED.values()},
    }
    for title, names in sections.items():
        out.print(title, style="bold")
        for name, about in names.items():
            out.print(f"  {name:<16} {about}", markup=False)


def collect(results: Iterable[T]) -> tuple[list[T], bool]:
    """Return the results, up to an interruption by the user, and whether there was one."""
    completed: list[T] = []
    try:
        for result in results:
            completed.append(result)
    except KeyboardInterrupt:
        return completed, True
    return completed, False


@dataclass(frozen=True)
class BenchmarkResult:
    """The output of a sub-benchmark.

    ``rows``: dataclasses. ``wrong``: contenders whose losses differ from those of serial. ``kind``: the name of the
    rows in the JSON file.
    """

    shown: Table
    footnotes: list[str]
    rows: Sequence[Any]
    interrupted: bool
    wrong: list[str]
    kind: str = "rows"


def run_fuse(parsed: argparse.Namespace) -> BenchmarkResult:
    """Run the sub-benchmark ``fuse`` and draw its plots, or measure startup or memory instead, as selected."""
    chosen = fuse_settings(parsed)
    if parsed.startup:
        return run_startup(chosen)
    if parsed.memory:
        return run_memory(chosen)
    with meter(fuse_benchmark.pieces(chosen)) as bar:
        comparisons, interrupted = collect(fuse_benchmark.run(chosen, bar))
    names = [contender.name for contender in chosen.contenders]
    shown, footnotes = comparison_table.table(comparisons, names)
    if parsed.plot and comparisons:
        plot.draw(results.rows_of(comparisons), parsed.plot)
    wrong = [cell.reason for comparison in comparisons for cell in comparison.cells if cell.disagrees]
    return BenchmarkResult(shown, footnotes, results.rows_of(comparisons), interrupted, wrong)


def run_startup(chosen: fuse_benchmark.FuseSettings) -> BenchmarkResult:
    """Measure the time that arrays need before they train."""
    with meter(startup_benchmark.pieces(chosen)) as bar:
        rows, interrupted = collect(startup_benchmark.run(chosen, bar))
    shown, footnotes = startup_benchmark.table(rows)
    return BenchmarkResult(shown, footnotes, rows, interrupted, wrong=[], kind="startup")


def run_memory(chosen: fuse_benchmark.FuseSettings) -> BenchmarkResult:
    """Measure the memory that contenders need for each member."""
    with meter(memory_benchmark.pieces(chosen)) as bar:
        groups, interrupted = collect(memory_benchmark.run(chosen, bar))
    rows = [row for group in groups for row in group]
    shown, footnotes = memory_benchmark.table(rows, [contender.name for contender in chosen.contenders])
    wrong = [row.reason for row in rows if row.disagrees]
    return BenchmarkResult(shown, footnotes, rows, interrupted, wrong, kind="memory")


def run_optim(parsed: argparse.Namespace) -> BenchmarkResult:
    """Run the sub-benchmark ``optim``."""
    chosen = optim_settings(parsed)
    with meter(optim_benchmark.pieces(chosen)) as bar:
        groups, interrupted = collect(optim_benchmark.run(chosen, bar))
    rows = [row for group in groups for row in group]
    footnotes = [f"{name}: {about}" for name, about in optim_benchmark.ABOUT.items()]
    footnotes.append(f"kernels of {optim_benchmark.OURS}: {optim_benchmark.form(chosen.device)}")
    return BenchmarkResult(optim_benchmark.table(rows), footnotes, rows, interrupted, wrong=[])


def run_shard(parsed: argparse.Namespace) -> BenchmarkResult:
    """Run the sub-benchmark ``shard``."""
    chosen = shard_settings(parsed)
    with meter(shard_benchmark.pieces(chosen)) as bar:
        groups, interrupted = collect(shard_benchmark.run(chosen, bar))
    rows = [row for group in groups for row in group]
    shown, footnotes = shard_results.table(rows)
    wrong = [row.reason for row in rows if row.disagrees]
    return BenchmarkResult(shown, footnotes, rows, interrupted, wrong)


def run_schedule(parsed: argparse.Namespace) -> BenchmarkResult:
    """Run the sub-benchmark ``schedule``."""
    chosen = schedule_settings(parsed)
    with meter(schedule_benchmark.pieces(chosen)) as bar:
        rows, interrupted = collect(schedule_benchmark.run(chosen, bar))
    footnotes = [f"{policy.name}: {policy.about}" for policy in chosen.policies]
    return BenchmarkResult(schedule_benchmark.table(rows), footnotes, rows, interrupted, wrong=[])


def run_foretold(parsed: argparse.Namespace) -> BenchmarkResult:
    """Run the sub-benchmark ``foretold``."""
    chosen = foretold_settings(parsed)
    with meter(foretold_benchmark.pieces(chosen)) as bar:
        rows, interrupted = collect(foretold_benchmark.run(chosen, bar))
    return BenchmarkResult(foretold_benchmark.table(rows), [], rows, interrupted, wrong=[])


def run_train(parsed: argparse.Namespace) -> BenchmarkResult:
    """Run the sub-benchmark ``train``."""
    chosen = train_settings(parsed)
    with meter(train_benchmark.pieces(chosen)) as bar:
        rows, interrupted = collect(train_benchmark.run(chosen, bar))
    return BenchmarkResult(train_benchmark.table(rows), [], rows, interrupted, wrong=[])


def run_sweep(parsed: argparse.Namespace) -> BenchmarkResult:
    """Run the sub-benchmark ``sweep``, on the spaces of ``--space`` if there are any."""
    if parsed.space:
        return run_spaces(space_settings(parsed))
    chosen = sweep_settings(parsed)
    with meter(sweep_benchmark.pieces(chosen)) as bar:
        rows, interrupted = collect(sweep_benchmark.run(chosen, bar))
    if parsed.plot and rows:
        plot.draw_sweep(rows, parsed.plot)
    missing = [contender.name for contender in chosen.contenders if contender.missing()]
    footnotes = [f"{contender.name}: {contender.about}" for contender in chosen.contenders]
    footnotes += [f"left out, as a package is not installed: {', '.join(missing)}"] if missing else []
    wrong = [f"{row.case}, {row.contender}: {row.trials} trials" for row in rows if row.trials != chosen.trials]
    return BenchmarkResult(sweep_benchmark.table(rows), footnotes, rows, interrupted, wrong)


def run_spaces(chosen: search_spaces.SpaceSettings) -> BenchmarkResult:
    """Searches of unlike and like models, each a whole command."""
    with meter(search_spaces.pieces(chosen)) as bar:
        rows, interrupted = collect(search_spaces.run(chosen, bar))
    shown, footnotes = search_spaces.table(rows)
    wrong = [row.reason for row in rows if row.disagrees]
    return BenchmarkResult(shown, footnotes, rows, interrupted, wrong, kind="spaces")


def run_short(parsed: argparse.Namespace) -> BenchmarkResult:
    """Run the sub-benchmark ``short``."""
    chosen = short_settings(parsed)
    with meter(short_benchmark.pieces(chosen)) as bar:
        rows, interrupted = collect(short_benchmark.run(chosen, bar))
    shown, footnotes = short_benchmark.table(rows)
    wrong = [row.reason for row in rows if row.disagrees]
    return BenchmarkResult(shown, footnotes, rows, interrupted, wrong)


RUN: dict[str, Callable[[argparse.Namespace], BenchmarkResult]] = {
    "fuse": run_fuse,
    "optim": run_optim,
    "shard": run_shard,
    "schedule": run_schedule,
    "foretold": run_foretold,
    "train": run_train,
    "short": run_short,
    "sweep": run_sweep,
}


def main(arguments: Sequence[str]) -> int:
    """Run the sub-benchmark that ``arguments`` select.

    Returns the exit status: 0; 1 if a contender computes wrong losses; 130 after an interruption, when the
    measurements so far are still shown and written.
    """
    if arguments and arguments[0] in SEPARATE:
        name = arguments[0].replace("-", "_")
        status = importlib.import_module(f"hfusion.bench.{name}_benchmark").main(arguments[1:])
        return status if isinstance(status, int) else 0
    parsed = parse(arguments)
    out = console()
    if parsed.list:
        print_names(out)
        return 0
    if parsed.earlier_rows:
        plot.draw(parsed.earlier_rows, parsed.plot)
        return 0
    torch.set_num_threads(parsed.threads)
    before = gpu_state(parsed.device)
    outcome = RUN[parsed.benchmark](parsed)
    states = {"gpu before": before, "gpu after": gpu_state(parsed.device)} if before else {}
    machine = describe(parsed.device) | states | ({"amp": parsed.amp} if parsed.amp else {})
    out.print(outcome.shown)
    for line in (*outcome.footnotes, ", ".join(f"{name} {value}" for name, value in machine.items())):
        out.print(line, markup=False, soft_wrap=True)
    if parsed.json:
        results.write_json(parsed.json, machine, outcome.rows, outcome.kind)
    for reason in outcome.wrong:
        out.print(f"WRONG LOSSES: {reason}", style="bold red", markup=False, soft_wrap=True)
    if outcome.interrupted:
        out.print("interrupted: the table ends where the run ended", style="bold red")
        return 130
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

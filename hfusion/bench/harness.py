"""What all benchmarks share: interleaved times, rows and their tables, command lines, the machine.

A benchmark yields rows: dictionaries that a JSON file keeps as they are. A row without a time has a ``reason``;
``disagrees`` says that its contender computes other losses than members trained alone, and the command fails.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hfusion.device.backend import accelerators, backend, types
from hfusion.device.native import processor_name

Row = dict[str, Any]
Cell = str | Text

CPU = torch.device("cpu")
# A terminal is as wide as it is, a file or a pipe has no width.
_WIDTH_WITHOUT_TERMINAL = 200


@dataclass(frozen=True)
class Benchmark:
    """A benchmark with a command of its own.

    Attributes:
        about: the benchmark, first in one line.
        run: yields the rows, as soon as each is measured.
        table: draws the rows.
        choices: what there is to compare, by kind: objects with a ``name`` and a line ``about`` them. ``models`` and
            ``contenders`` become options, whose value is None unless the user chooses.
        members: whether there is an option for numbers of members.
        add_options: adds further options.
    """

    about: str | None
    run: Callable[[argparse.Namespace], Iterable[Row]]
    table: Callable[[Sequence[Row]], Table]
    choices: Mapping[str, Sequence[Any]]
    members: bool = False
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None


# Times


@contextmanager
def collector_off() -> Iterator[None]:
    """Context manager: no pauses of the garbage collector."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def measure(step: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the seconds per call of ``step`` over ``count`` calls."""
    with collector_off():
        return backend(device).seconds(lambda: [step() for _ in range(count)]) / count


def calibrate(step: Callable[[], object], slot: float, device: torch.device) -> int:
    """Return the number of calls of ``step`` that last at least ``slot`` seconds; also warms up."""
    count = 1
    while (seconds := measure(step, count, device)) * count < slot:
        count = max(count + 1, min(10 * count, math.ceil(1.1 * slot / max(seconds, 1e-9))))
    return count


def interleave(
    steps: Mapping[str, Callable[[], object]], rounds: int, slot: float, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds per step of each contender in each round: A B A B.

    Disturbances on a shared machine last longer than a round, so they affect all contenders of a round alike: a ratio
    within rounds varies less than the ratio of two medians.
    """
    counts = {name: calibrate(step, slot, device) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(measure(step, counts[name], device))
    return seconds


def speedup(baseline: Sequence[float], other: Sequence[float]) -> float:
    """Return the speedup of ``other`` over ``baseline``: the median of the ratios of each round."""
    return statistics.median(b / o for b, o in zip(baseline, other, strict=True))


def spread(values: Sequence[float]) -> float:
    """Return the distance of the quartiles over the median; 0.0 for a single value."""
    if len(values) < 2:
        return 0.0
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / middle


def children_cpu_seconds() -> float:
    """Return the processor time of child processes that have ended, and of theirs. Needs POSIX."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# Tables


def factor(value: float | None) -> Text:
    """Return a speed-up as text, green from 1.0 on and red below; the number says the same without colour."""
    return Text("-") if value is None else Text(f"{value:.2f}x", style="green" if value >= 1.0 else "red")


def number(value: float | None, digits: int = 1) -> str:
    """Return a number as text, a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def row_table(
    title: str, rows: Sequence[Row], labels: Sequence[str], values: Mapping[str, Callable[[Row], Cell]]
) -> Table:
    """Return a table with a line for each row, and a section for each value of the first label.

    labels: keys of the rows that are shown as they are. values: the other columns, by heading. Remarks are the reason
    why there is no time, or the ``note`` of a row.
    """
    shown = Table(title=title)
    for label in labels:
        shown.add_column(label, no_wrap=True)
    for heading in values:
        shown.add_column(heading, justify="right")
    shown.add_column("remarks")
    for before, row in zip([None, *rows], rows, strict=False):
        if before and before[labels[0]] != row[labels[0]]:
            shown.add_section()
        cells: list[Cell] = ["" for _ in values]
        if not row.get("reason"):
            cells = [show(row) for show in values.values()]
        elif cells:
            wrong = row.get("disagrees")
            cells[0] = Text("WRONG", "bold red") if wrong else Text("n/a", "yellow")
        remark = Text(row.get("reason") or row.get("note", ""))
        shown.add_row(*(str(row[label]) for label in labels), *cells, remark)
    return shown


# Commands


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def count(text: str) -> int:
    """Return a whole number of at least 1: a type of arguments."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Return the whole numbers of a list with commas: a type of arguments."""
    return tuple(count(part.strip()) for part in text.split(","))


def chosen_from(options: Sequence[Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a type of arguments: the options that a list with commas names, in its order."""
    by_name = {option.name: option for option in options}

    def choose(text: str) -> tuple[Any, ...]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in by_name:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}: choose from {', '.join(by_name)}")
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"a name occurs twice in {text!r}: name each once")
        return tuple(by_name[name] for name in names)

    return choose


def _device(text: str) -> torch.device:
    names = ("cpu", *types())
    if text not in names:
        raise argparse.ArgumentTypeError(f"unknown device {text!r}: choose from {', '.join(names)}")
    if text != "cpu" and text not in {device.type for device in accelerators()}:
        raise argparse.ArgumentTypeError(f"torch sees no {text} device here: leave --device out")
    return torch.device(text)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.absolute().parent}")
    return path


def say(text: str) -> None:
    """Show what is being measured on stderr, if that is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def run_command(benchmark: Benchmark, prog: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark with its command line, show the table, and write the JSON file.

    Returns the exit status: 0; 1 if a row disagrees; 130 after an interruption, when the rows so far are still shown.
    """
    parser = OneLineParser(prog, description=benchmark.about, allow_abbrev=False)
    parser.add_argument("--json", metavar="FILE", type=_file, help="write machine and rows to FILE")
    parser.add_argument("--quick", action="store_true", help="few cases and rounds")
    parser.add_argument("--repeats", type=count, help="rounds, in each of which every contender runs")
    parser.add_argument("--threads", type=count, default=1, help="threads of torch (default 1)")
    parser.add_argument("--device", type=_device, default=CPU, help="cpu (default), or the type of an accelerator")
    for kind in ("models", "contenders"):
        if kind in benchmark.choices:
            chosen = chosen_from(benchmark.choices[kind])
            parser.add_argument(f"--{kind}", metavar="A,B", type=chosen, help="these only; --list prints all")
    if benchmark.members:
        parser.add_argument("--members", metavar="4,16", type=counts, help="numbers of members")
    benchmark.add_options(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    machine = describe(options.device) | {"command": " ".join([parser.prog, *(arguments or sys.argv[1:])])}
    rows, interrupted = list[Row](), False
    try:
        for row in benchmark.run(options):
            rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
    say("")
    out = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL, highlight=False)
    out.print(benchmark.table(rows))
    names = {row.get("contender") for row in rows}
    lines = [f"{each.name}: {each.about}" for kind in benchmark.choices.values() for each in kind if each.name in names]
    wrong = [f"WRONG: {row['reason']}" for row in rows if row.get("disagrees")]
    for line in (*lines, ", ".join(f"{name} {value}" for name, value in machine.items()), *wrong):
        out.print(line, markup=False, soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    if interrupted:
        out.print("interrupted: the table ends where the run ended", style="bold red")
        return 130
    return 1 if wrong else 0


def describe(device: torch.device) -> dict[str, str | int]:
    """Return processor, cores, threads of torch, versions, system, today's date; with an accelerator its name too."""
    facts: dict[str, str | int] = {
        "cpu": processor_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "date": datetime.date.today().isoformat(),
    }
    if device.type != "cpu":
        facts["gpu"] = backend(device).name
    return facts

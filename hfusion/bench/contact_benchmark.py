"""The first run on a GPU: ``python -m hfusion.bench contact --json contact.json``, about ten minutes.

Checks all that hfusion does on an accelerator against the members alone, and times it. Every check runs in a process of
its own with a time limit, so that none can stop the others. Each writes a line of JSON as it ends; a table comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hfusion.bench.command_line import OneLineParser
from hfusion.bench.contact_item import ContactItem, ContactStatus
from hfusion.bench.contact_items import items
from hfusion.bench.contact_process import ContactRow, ContactRun, run_all
from hfusion.device.backend import accelerators

MINUTES = 10.0
NO_ACCELERATOR = "torch sees no accelerator here: these are checks on the CPU"
NOT_COMPUTED = (
    "not computed: kernels of this device compute nothing, so that values were not compared, and times mean nothing"
)
_STYLES = {ContactStatus.OK: "green", ContactStatus.SKIPPED: "yellow", ContactStatus.NOT_COMPUTED: "yellow"}
_REASON = 400


@dataclass
class ContactLog:
    """The rows of a run so far, each written as it comes: to ``out`` in words, to ``file`` as a line of JSON."""

    out: Console
    file: Path | None
    total: int

    def collect(self, rows: Iterator[ContactRow]) -> tuple[list[ContactRow], bool]:
        """Return all rows, and whether the user interrupted."""
        collected: list[ContactRow] = []
        with self.file.open("w") if self.file else nullcontext() as lines:
            try:
                for row in rows:
                    collected.append(row)
                    if lines:
                        print(json.dumps(asdict(row)), file=lines, flush=True)
                    status = f"{len(collected)}/{self.total} {row.item}: {row.status}, {row.seconds:.1f} s"
                    self.out.print(f"{status}  {row.reason[:_REASON]}".rstrip(), markup=False, soft_wrap=True)
            except KeyboardInterrupt:
                return collected, True
        return collected, False


def main(arguments: Sequence[str]) -> int:
    """Run the checks. Returns 0, 1 if one shows a fault, 130 after an interruption."""
    option_parser = parser()
    parsed = option_parser.parse_args(arguments)
    device = parsed.device or first_accelerator() or torch.device("cpu")
    chosen = choose(items(parsed.quick), parsed.only)
    if not chosen:
        option_parser.error(f"--only {parsed.only}: no check has a name that starts so; --list prints the names")
    out = Console(width=None if os.isatty(1) else 160, highlight=False)
    if parsed.list:
        for item in chosen:
            out.print(item.name, markup=False, soft_wrap=True)
        return 0
    if first_accelerator() is None:
        out.print(NO_ACCELERATOR, markup=False, soft_wrap=True)
    run = ContactRun(device, time.monotonic() + 60 * parsed.minutes, Event())
    with interrupted_by_termination():
        log = ContactLog(out, parsed.json, len(chosen))
        rows, interrupted = log.collect(run_all(chosen, run, max(1, parsed.jobs)))
    out.print(table(rows))
    for line in footnotes(rows):
        out.print(line, markup=False, soft_wrap=True)
    if interrupted:
        out.print("interrupted: the table ends where the run ended", style="bold red")
        return 130
    return 1 if any(ContactStatus(row.status).is_fault for row in rows) else 0


def parser() -> OneLineParser:
    """Return the options of the command."""
    jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
    option_parser = OneLineParser(prog="python -m hfusion.bench contact", description=__doc__, allow_abbrev=False)
    option_parser.add_argument("--json", type=_file, metavar="FILE", help="write a line of JSON for each check to FILE")
    option_parser.add_argument(
        "--device", type=_device, help="default: the first accelerator that torch sees, else cpu"
    )
    option_parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="no check starts after them (default %(default)g)"
    )
    option_parser.add_argument("--only", metavar="A,B", help="checks whose names start so; --list prints them")
    option_parser.add_argument(
        "--jobs", type=int, default=jobs, help="checks at a time, but for timed ones (default %(default)s)"
    )
    option_parser.add_argument("--quick", action="store_true", help="some small checks of each kind")
    option_parser.add_argument("--list", action="store_true", help="print the names of the checks")
    return option_parser


def first_accelerator() -> torch.device | None:
    """Return the first accelerator that torch sees; None if it sees none."""
    return next(iter(accelerators()), None)


def _device(text: str) -> torch.device:
    """Return the device of this name, or the first of this type."""
    present = {str(device): device for device in reversed(accelerators())}
    present |= {device.type: device for device in reversed(accelerators())} | {"cpu": torch.device("cpu")}
    if text not in present:
        raise argparse.ArgumentTypeError(f"no {text} here: choose from {', '.join(sorted(present))}")
    return present[text]


def _file(text: str) -> Path:
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.absolute().parent}")
    return path


def choose(every: Sequence[ContactItem], only: str | None) -> list[ContactItem]:
    """Return the checks whose names start with one of the comma-separated words; all for None."""
    starts = tuple(word.strip() for word in only.split(",")) if only else ("",)
    return [item for item in every if item.name.startswith(starts)]


@contextmanager
def interrupted_by_termination() -> Iterator[None]:
    """Context manager: treat SIGTERM like Ctrl-C, so that processes end and the table shows the results so far."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def table(rows: Sequence[ContactRow]) -> Table:
    """Return a row for each check: its status, and its figures or the fault."""
    shown = Table(title="first contact with this machine")
    shown.add_column("check", no_wrap=True)
    shown.add_column("result", no_wrap=True)
    shown.add_column("s", justify="right")
    shown.add_column("figures, or what is wrong", overflow="fold")
    for row in rows:
        result = Text(row.status, style=_STYLES.get(ContactStatus(row.status), "bold red"))
        cell = "; ".join(text for text in (row.reason[:_REASON], row.summary) if text)
        shown.add_row(Text(row.item), result, f"{row.seconds:.1f}", Text(cell))
    return shown


def footnotes(rows: Sequence[ContactRow]) -> list[str]:
    """Return the number of checks by status, and what it means on a device that computes nothing."""
    counts = Counter(row.status for row in rows)
    lines = [", ".join(f"{count} {status}" for status, count in counts.items())]
    return [*lines, NOT_COMPUTED] if counts[ContactStatus.NOT_COMPUTED.value] else lines

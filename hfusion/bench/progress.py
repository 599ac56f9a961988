"""A progress bar on stderr, so that stdout stays clean for the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class Meter:
    """A progress meter: ``say`` names the current work, ``advance`` counts finished pieces of the total."""

    say: Callable[[str], None]
    advance: Callable[[int], None]


@contextmanager
def meter(total: int) -> Iterator[Meter]:
    """Show a bar of ``total`` pieces while the block runs."""
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield Meter(
            say=lambda text: progress.update(task, description=text),
            advance=lambda pieces: progress.advance(task, pieces),
        )

"""Progress of a run: a bar for each task, or a few lines where output cannot be redrawn."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# More bars than this fit no screen.
_MAX_BARS = 12
# Minimum seconds between two redraws.
_REDRAW = 0.1


class TaskBars:
    """Progress in a terminal: a bar for each task, or a single one for many tasks. Elsewhere ten lines in all.

    Args:
        tasks: the name and the number of minibatches of each task.
        begun: how many of them were trained before.
    """

    def __init__(self, tasks: Sequence[tuple[str, int]], begun: Sequence[int], console: Console | None = None) -> None:
        # Imported late: only progress bars need it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console() if console is None else console
        self._names, self._totals = [name for name, _ in tasks], [steps for _, steps in tasks]
        self._done, self._start, self._lock = [*begun], perf_counter(), Lock()
        self._draws = self._console.is_terminal and not self._console.is_dumb_terminal and not self._console.is_jupyter
        # Task names are not read as markup. No auto_refresh: rich does not wait for its drawing thread at the end.
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bars = Progress(*columns, console=self._console, auto_refresh=False, disable=not self._draws)
        rows = [(name, total, done) for (name, total), done in zip(tasks, begun, strict=True)]
        if len(tasks) > _MAX_BARS:
            rows = [(f"{len(tasks)} tasks", sum(self._totals), sum(begun))]
        self._rows = [self._bars.add_task(name, total=total, completed=done) for name, total, done in rows]
        self._drawn, self._tenth = perf_counter(), self._tenths()

    def __enter__(self) -> TaskBars:
        self._bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bars.refresh()
        self._bars.stop()

    def advance(self, index: int, *, over: bool = False) -> None:
        """Advance a task by one minibatch. ``over``: do not advance, but end the task where it is."""
        with self._lock:
            if over:
                self._totals[index] = self._done[index]
            self._show(index, self._done[index] + (not over))

    def reach(self, index: int, steps: int) -> None:
        """Set a task to ``steps`` minibatches; fewer than before if it restarted from a checkpoint."""
        with self._lock:
            self._show(index, steps)

    def _tenths(self) -> int:
        return 10 * sum(self._done) // max(1, sum(self._totals))

    def _show(self, index: int, steps: int) -> None:
        self._done[index] = steps
        if self._draws:
            alone = len(self._rows) == len(self._names)
            done, total = (steps, self._totals[index]) if alone else (sum(self._done), sum(self._totals))
            self._bars.update(self._rows[index if alone else 0], completed=done, total=total)
            if perf_counter() - self._drawn > _REDRAW:
                self._bars.refresh()
                self._drawn = perf_counter()
        elif self._tenths() > self._tenth:
            self._tenth = self._tenths()
            shown = ", ".join(self._names[:3]) + (f" and {len(self._names) - 3} more" if self._names[3:] else "")
            seconds = perf_counter() - self._start
            line = f"{sum(self._done)}/{sum(self._totals)} minibatches of {shown}, {seconds:.0f} s"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

"""Progress of a run: a bar for each task, or a few lines where output cannot be redrawn."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

from hfusion.core.progress_output import ProgressBars, Tenths, plain

if TYPE_CHECKING:
    from rich.console import Console

# More bars than this fit no screen.
_MAX_BARS = 12


class TaskBars:
    """Progress bars. ``tasks``: pairs of a name and a number of minibatches; ``begun``: how many were trained before.

    With many tasks, only those in progress have bars, below one bar for all tasks.
    """

    def __init__(self, tasks: Sequence[tuple[str, int]], begun: Sequence[int], console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

        self._console = Console() if console is None else console
        self._names, self._totals = [name for name, _ in tasks], [steps for _, steps in tasks]
        self._done = [*begun]
        self._start = perf_counter()
        self._lock = Lock()
        columns = (plain("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress_bars = ProgressBars(self._console, *columns)
        self._bars = self._progress_bars.progress
        self._lines = None if self._progress_bars.draws else Tenths(sum(begun), sum(self._totals))
        self._many = len(tasks) > _MAX_BARS
        self._all = self._bars.add_task(
            f"{len(tasks)} tasks", total=sum(self._totals), completed=sum(begun), visible=self._many
        )
        self._rows = [
            self._bars.add_task(name, total=total, completed=done, visible=not self._many)
            for name, total, done in zip(self._names, self._totals, self._done, strict=True)
        ]
        self._shown = 0

    def __enter__(self) -> TaskBars:
        self._progress_bars.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress_bars.__exit__()

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

    def _show(self, index: int, steps: int) -> None:
        self._done[index] = steps
        done = sum(self._done)
        if self._lines is None:
            self._draw(index, ended=steps == self._totals[index], done=done)
        elif self._lines.reached(done, sum(self._totals)):
            shown = ", ".join(self._names[:3]) + (f" and {len(self._names) - 3} more" if self._names[3:] else "")
            seconds = perf_counter() - self._start
            line = f"{done}/{sum(self._totals)} minibatches of {shown}, {seconds:.0f} s"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _draw(self, index: int, *, ended: bool, done: int) -> None:
        row = self._rows[index]
        visible = self._bars.tasks[row].visible
        if self._many:
            visible = not ended and (visible or self._shown < _MAX_BARS)
            self._shown += visible - self._bars.tasks[row].visible
        self._bars.update(row, completed=self._done[index], total=self._totals[index], visible=visible)
        self._bars.update(self._all, completed=done, total=sum(self._totals))
        self._progress_bars.draw()

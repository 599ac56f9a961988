"""Progress of a run: a bar for each task, or a few lines where output cannot be redrawn."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn, TextColumn
    from rich.table import Table


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


# Progress output in terminals, notebooks and log files.

# Minimum seconds between two redraws of the bars; a notebook sends each redraw to a browser.
_REDRAW, _REDRAW_NOTEBOOK = 0.1, 0.5


def redraws(console: Console) -> bool:
    """Return whether output can be redrawn, as in a terminal or a notebook.

    In other places, such as the log file of a batch job, all output stays.
    """
    if console.is_jupyter:
        return find_spec("IPython") is not None
    return console.is_terminal and not console.is_dumb_terminal


class ProgressBars:
    """Progress bars of rich, redrawn in place, or not drawn where output cannot be redrawn.

    In a notebook rich would draw with ipywidgets, which the notebook's file, and a page made of it, do not keep; here
    the bars are an ordinary output that is replaced.
    """

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        # Imported late: only progress bars need it.
        from rich.progress import Progress

        self.draws = redraws(console)
        self._notebook = self.draws and console.is_jupyter
        # No auto_refresh: rich does not wait for its drawing thread at the end.
        self.progress = Progress(
            *columns, console=console, auto_refresh=False, disable=self._notebook or not self.draws
        )
        self._pause = _REDRAW_NOTEBOOK if self._notebook else _REDRAW
        self._drawn = perf_counter()
        self._output: Any = None

    def __enter__(self) -> ProgressBars:
        if self._notebook:
            from IPython.display import display

            self._output = display(self._table, display_id=True)
        else:
            self.progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._draw()
        if not self._notebook:
            self.progress.stop()

    def draw(self) -> None:
        """Redraw the bars, unless they were drawn a moment ago."""
        if perf_counter() - self._drawn > self._pause:
            self._draw()

    def _draw(self) -> None:
        if self._output is not None:
            self._output.update(self._table)
        else:
            self.progress.refresh()
        self._drawn = perf_counter()

    @property
    def _table(self) -> Table:
        return self.progress.make_tasks_table(self.progress.tasks)


def plain(text: str) -> TextColumn:
    """Return a column that prints ``text``, such as ``{task.description}``, without markup."""
    from rich.progress import TextColumn

    return TextColumn(text, markup=False)


class Tenths:
    """Select the steps to log where output cannot be redrawn: every tenth. ``done``: steps of an earlier run."""

    def __init__(self, done: int, total: int) -> None:
        self._last_tenth = _tenths(done, total)

    def reached(self, done: int, total: int) -> bool:
        """Return whether another tenth of the steps is done. ``total`` may have decreased in the meantime."""
        before, self._last_tenth = self._last_tenth, max(self._last_tenth, _tenths(done, total))
        return self._last_tenth > before


def _tenths(done: int, total: int) -> int:
    return 10 * done // max(1, total)

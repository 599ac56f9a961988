"""Progress output in terminals, notebooks and log files."""

from __future__ import annotations

from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn, TextColumn
    from rich.table import Table

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

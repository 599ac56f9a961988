"""What people look at while something runs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def redraws(console: Console) -> bool:
    """Whether what was drawn can be drawn over: in a terminal, and in a notebook that has ipywidgets.

    Elsewhere, as in the file of a batch job, everything that is drawn stays.
    """
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal


class Tenths:
    """Which steps are worth a line where lines stay: those that complete another tenth; ``done`` were made before."""

    def __init__(self, done: int, total: int) -> None:
        self._told = _tenths(done, total)

    def reached(self, done: int, total: int) -> bool:
        """``total`` may have become less meanwhile."""
        before, self._told = self._told, max(self._told, _tenths(done, total))
        return self._told > before


def _tenths(done: int, total: int) -> int:
    return 10 * done // max(1, total)

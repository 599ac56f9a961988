"""The results of the sub-benchmark ``fuse`` as a table: wins and losses in the same words and size."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from hfusion.bench.results import OURS, Cell, ModelResult


class Footnotes:
    """Numbers for remarks; the same remark keeps its number."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def mark(self, remark: str) -> str:
        """`` [n]`` for ``remark``, nothing for an empty one."""
        if not remark:
            return ""
        if remark not in self.remarks:
            self.remarks.append(remark)
        return f" [{self.remarks.index(remark) + 1}]"

    def lines(self) -> list[str]:
        return [f"[{number}] {remark}" for number, remark in enumerate(self.remarks, start=1)]


def factor(value: float) -> Text:
    """A speed-up, green from 1.0 on and red below; the number says the same without colour."""
    return Text(f"{value:.2f}x", style="green" if value >= 1.0 else "red")


def _shown(comparison: ModelResult, cell: Cell, row_ms: float | None, footnotes: Footnotes) -> Text:
    if row_ms is None:
        word = "WRONG" if cell.disagrees else "n/a"
        mark = footnotes.mark(f"{cell.contender}: {cell.reason}")
        return Text(word + mark, style="bold red" if cell.disagrees else "yellow")
    text = Text(f"{row_ms:.3g} ms" if row_ms < 1e3 else f"{row_ms:.0f} ms")
    speedup = comparison.speedup(cell)
    if speedup is not None:
        text.append("\n").append_text(factor(speedup))
    many = comparison.oversubscription(cell) > 1
    cores = f"wall time on {cell.cores} cores; the last column counts it per core" if many else ""
    return text.append(footnotes.mark(cell.note)).append(footnotes.mark(cores))


def _versus(comparison: ModelResult) -> Text:
    best = comparison.versus_best()
    if best is None:
        return Text("-")
    name, ratio = best
    return factor(ratio).append(f"\n{name}", style="default")


def table(comparisons: Sequence[ModelResult], contenders: Sequence[str]) -> tuple[Table, list[str]]:
    """A row per comparison, a column per contender: ms per step of all members, speed-up over serial.

    The last column compares the faster of hfusion's ways with the fastest other contender. Returns the table and
    its footnotes.
    """
    footnotes = Footnotes()
    shown = Table(title="one training step of all members", show_lines=True)
    shown.add_column("model", no_wrap=True)
    shown.add_column("members", justify="right")
    for name in contenders:
        shown.add_column(name, justify="right")
    with_hfusion = not {*OURS}.isdisjoint(contenders)
    if with_hfusion:
        shown.add_column(f"{OURS[0]} vs best other", justify="right")
    for comparison in comparisons:
        cells = [
            _shown(comparison, cell, row.ms, footnotes)
            for cell, row in zip(comparison.cells, comparison.rows(), strict=True)
        ]
        last = [_versus(comparison)] if with_hfusion else []
        shown.add_row(Text(comparison.model), Text(str(comparison.members)), *cells, *last)
    return shown, footnotes.lines()

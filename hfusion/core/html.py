"""Small HTML for notebooks: tables that fold. Text is escaped, and long tables are cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

MAX_ROWS = 20


def table(head: Sequence[str], rows: Iterable[Sequence[object]], total: int) -> str:
    """Return a table of at most MAX_ROWS rows; a last row says how many of ``total`` were left out.

    >>> table(["a", "b"], [("<x>", 1)], 1)
    '<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>&lt;x&gt;</td><td>1</td></tr></tbody></table>'
    """
    shown = [_row("td", cells) for cells in islice(rows, MAX_ROWS)]
    if total > len(shown):
        shown.append(f'<tr><td colspan="{len(head)}">... {total - len(shown)} more</td></tr>')
    return f"<table><thead>{_row('th', head)}</thead><tbody>{''.join(shown)}</tbody></table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _text(cell: object) -> str:
    return escape("" if cell is None else str(cell))


def folded(summary: str, body: str, is_open: bool = False) -> str:
    """Return ``body``, which is HTML, under a line of text that shows and hides it.

    Parts of the line that two spaces divide, as in print, are divided by dots.

    >>> folded("a < b  4 rows", "<p>body</p>")
    '<details><summary>a &lt; b · 4 rows</summary><p>body</p></details>'
    """
    attribute = ' open="open"' if is_open else ""
    line = " · ".join(part.strip() for part in summary.split("  ") if part.strip())
    return f"<details{attribute}><summary>{escape(line)}</summary>{body}</details>"


def paragraph(text: str) -> str:
    """Return text as a paragraph."""
    return f"<p>{escape(text)}</p>"

"""Numbers and tables for people: as text, and as small HTML for notebooks, escaped and cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from html import escape
from itertools import islice
from urllib.parse import quote

# Length to which a file name is cut before its hash; most file systems allow 255.
MAX_FILE_NAME = 200


def readable(count: float) -> str:
    """Return a number of bytes with a binary prefix.

    >>> readable(3 * 1024**3)
    '3.0GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f}B" if unit == "B" else f"{count:.1f}{unit}"
        count /= 1024
    return f"{count:.1f}TiB"


def file_name(name: str, safe: str = "") -> str:
    """Return a file name for ``name``: a different one for each name, and never a path to another folder.

    ASCII letters, digits, ``_-.~`` and characters in ``safe`` stay as they are, except for a leading dot.

    >>> file_name("../a_b"), file_name("a b", safe=" ")
    ('%2E.%2Fa_b', 'a b')
    """
    quoted = quote(name, safe=safe)
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"
    if 0 < len(quoted) <= MAX_FILE_NAME:
        return quoted
    # Only these names have a percent sign that is not followed by a hexadecimal digit.
    return f"{quoted[:MAX_FILE_NAME]}%~{blake2b(name.encode(), digest_size=16).hexdigest()}"


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return a line for each row, in aligned columns: the first ``left`` at the left, the others at the right.

    >>> aligned([("a", "1"), ("bc", "10")], left=1)
    ['a    1', 'bc  10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def placed(index: int, cell: str) -> str:
        return cell.ljust(widths[index]) if index < left else cell.rjust(widths[index])

    return ["  ".join(map(placed, range(len(row)), row)).rstrip() for row in rows]


# Small HTML for notebooks: tables that fold. Text is escaped, and long tables are cut.

MAX_ROWS = 20


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]], total: int) -> str:
    """Return a table of at most MAX_ROWS rows; a last row says how many of ``total`` were left out.

    >>> html_table(["a", "b"], [("<x>", 1)], 1)
    '<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>&lt;x&gt;</td><td>1</td></tr></tbody></table>'
    """
    shown = [_row("td", cells) for cells in islice(rows, MAX_ROWS)]
    if total > len(shown):
        shown.append(f'<tr><td colspan="{len(head)}">... {total - len(shown)} more</td></tr>')
    return f"<table><thead>{_row('th', head)}</thead><tbody>{''.join(shown)}</tbody></table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    texts = [escape("" if cell is None else str(cell)) for cell in cells]
    return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"


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

"""Numbers and tables for people."""

from __future__ import annotations

from collections.abc import Sequence


def readable(count: float) -> str:
    """Bytes with binary prefixes.

    >>> readable(3 * 1024**3)
    '3.0GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f}B" if unit == "B" else f"{count:.1f}{unit}"
        count /= 1024
    return f"{count:.1f}TiB"


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """A line for each row, columns of one width: so many begin at the left, the others end at the right.

    >>> aligned([("a", "1"), ("bc", "10")], left=1)
    ['a    1', 'bc  10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def placed(place: int, cell: str) -> str:
        return cell.ljust(widths[place]) if place < left else cell.rjust(widths[place])

    return ["  ".join(map(placed, range(len(row)), row)).rstrip() for row in rows]

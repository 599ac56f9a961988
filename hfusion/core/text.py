"""Numbers and tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
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

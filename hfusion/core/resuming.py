"""Checkpoint folders of runs that were started by ``python -m hfusion run SCRIPT --resume FOLDER``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_root: Path | None = None
_counts: Counter[str] = Counter()


@contextmanager
def resuming(root: Path) -> Iterator[None]:
    """Context manager: runs without a `directory` use a folder below this one. Not for nested use."""
    global _root
    _root = root
    _counts.clear()
    try:
        yield
    finally:
        _root = None


def resume_folder(kind: str) -> Path | None:
    """The folder of the next run of this kind, by the order in which a script starts them; None where it has none."""
    if _root is None:
        return None
    _counts[kind] += 1
    return _root / f"{kind}-{_counts[kind]}"

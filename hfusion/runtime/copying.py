"""Copies of memory: between two storages, or two contiguous tensors of one dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Move(NamedTuple):
    """What is to be copied, and where."""

    target: Any
    source: Any


def copy_now(moves: Iterable[Move]) -> None:
    """Copy here and now; on an accelerator, in the queue of this thread."""
    for target, source in moves:
        target.copy_(source, non_blocking=True)

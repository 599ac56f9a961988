"""A cache of work recorded on a device for replay, by kind, which gives up recording after too many failures."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

# The most kinds that are recorded, since each recording keeps its memory.
MAX_RECORDED = 4
# How often tensors may move before recording is given up.
MAX_MOVES = 3

Recorded = TypeVar("Recorded")


class Recordings(Generic[Recorded]):
    """Recordings by kind of work. ``why``: the reason why nothing more is recorded; empty if recording is enabled."""

    def __init__(self, why: str = "") -> None:
        self.why = why
        self._recordings: dict[Hashable, Recorded] = {}
        self._moves = 0

    def __len__(self) -> int:
        return len(self._recordings)

    @property
    def full(self) -> bool:
        return len(self._recordings) == MAX_RECORDED

    def get(self, kind: Hashable) -> Recorded | None:
        """Return the recording of a kind, None if there is none."""
        return self._recordings.get(kind)

    def add(self, kind: Hashable, record: Callable[[], Recorded]) -> Recorded | None:
        """Keep the result of ``record``. If it raises, return None and give up recording."""
        try:
            recording = self._recordings[kind] = record()
        except Exception as error:
            first, _, _ = str(error).strip().partition("\n")
            self.why = f"{type(error).__name__}: {first[:300]}"
            self._recordings.clear()
            return None
        return recording

    def forget(self) -> None:
        """Drop all recordings, because the tensors have moved."""
        if not self._recordings:
            return
        self._recordings.clear()
        self._moves += 1
        if self._moves == MAX_MOVES:
            self.why = f"its tensors have moved {MAX_MOVES} times"

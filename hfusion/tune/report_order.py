"""The order in which the arrays of a sweep report, as a file that a resumed sweep replays."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path

ORDER = "order.txt"


class ReportOrder:
    """A file with one line per epoch of an array, written before the first of its trials is reported.

    Args:
        root: the folder of the sweep; None: nothing is written.
        count: the number of lines before the saved state. Later lines are replayed in their order.

    Attributes:
        replayed: the names of the arrays that report next, in the order recorded by the killed sweep.
    """

    def __init__(self, root: Path | None, count: int) -> None:
        self.count, self._path = count, None if root is None else root / ORDER
        self.replayed: deque[str] = deque()
        if self._path is None or not self._path.exists():
            return
        written = self._path.read_bytes()
        # An incomplete last line was never used: reports begin after the line is written.
        complete = written[: written.rfind(b"\n") + 1]
        os.truncate(self._path, len(complete))
        self.replayed.extend(line.split()[0].decode() for line in complete.splitlines()[count:])

    def skip_missing(self, names: Collection[str]) -> None:
        """Drop recorded arrays from the front as long as they are not in ``names``."""
        while self.replayed and self.replayed[0] not in names:
            self.replayed.popleft()
            self.count += 1

    def note(self, name: str, numbers: Sequence[int]) -> None:
        """Record that array ``name`` reports next, with its trials in the order of ``numbers``; or replay that."""
        self.count += 1
        if self.replayed:
            assert self.replayed.popleft() == name
        elif self._path is not None:
            with self._path.open("a") as file:
                print(name, *numbers, file=file)
                file.flush()
                os.fsync(file.fileno())

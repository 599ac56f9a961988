"""The order in which the arrays of a sweep report, as a file that a resumed sweep replays."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path

ORDER = "order.txt"


class ReportOrder:
    """A line for each epoch of an array, written before the first of its trials is reported.

    Args:
        root: the folder of the sweep; None: nothing is written.
        count: how many lines the saved state knows. Those after them come next, in their order.

    Attributes:
        replayed: the names of the arrays that report next, as the killed sweep had begun to report them.
    """

    def __init__(self, root: Path | None, count: int) -> None:
        self.count, self._path = count, None if root is None else root / ORDER
        self.replayed: deque[str] = deque()
        if self._path is None or not self._path.exists():
            return
        written = self._path.read_bytes()
        # Nothing was reported of a line that is not whole.
        whole = written[: written.rfind(b"\n") + 1]
        os.truncate(self._path, len(whole))
        self.replayed.extend(line.split()[0].decode() for line in whole.splitlines()[count:])

    def skip_missing(self, names: Collection[str]) -> None:
        """Forget arrays that report next and are none of ``names``."""
        while self.replayed and self.replayed[0] not in names:
            self.replayed.popleft()
            self.count += 1

    def note(self, name: str, numbers: Sequence[int]) -> None:
        """An array reports next, the trials with these ``numbers`` one after the other."""
        self.count += 1
        if self.replayed:
            assert self.replayed.popleft() == name
        elif self._path is not None:
            with self._path.open("a") as file:
                print(name, *numbers, file=file)
                file.flush()
                os.fsync(file.fileno())

"""The folder of a sweep, from which it can be resumed after it was killed.

Each array has a folder of its saves. The state of the sweep is written last, and names one save of each array. Like
every save it is written atomically.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from torch import Tensor

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

from hfusion.checkpoint import files
from hfusion.core.errors import CheckpointError

_LOCK, STATE, ARRAYS, JOURNAL = "lock", "state", "arrays", "study.journal"
# How many states, and saves of an array named by them, are kept.
KEEP = 2


class SweepFolder:
    """Locks the folder for this process until `close`. Raises CheckpointError if another process has locked it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with files.wrap_load_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (root / _LOCK).open("a")
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self._lock.close()
                raise CheckpointError(
                    f"{root} is in use by a sweep that runs: wait for its end, or give another directory"
                ) from error
            # Forked children would hold the lock otherwise.
            os.register_at_fork(after_in_child=self._lock.close)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    @property
    def journal_size(self) -> int:
        """The bytes of the journal of the study; 0 if there is none."""
        path = self.root / JOURNAL
        return path.stat().st_size if path.exists() else 0

    def rewind(self, size: int) -> None:
        """Cut the journal of the study to its size at the last save. What a killed sweep wrote later is done again."""
        if self.journal_size > size:
            os.truncate(self.root / JOURNAL, size)

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the last saved state. Raises CheckpointError if it is damaged."""
        if not files.saves(self.root / STATE):
            return None
        saved = files.read(self.root / STATE)
        return saved.body, saved.tensors

    def write(self, body: Mapping[str, Any], tensors: Mapping[str, Tensor], step: int) -> None:
        """Write the state of the sweep, then remove the folders of arrays that it does not name."""
        files.write(self.root / STATE, body, tensors, step=step, keep=KEEP)
        named = {array["name"] for array in body["arrays"]}
        for path in (self.root / ARRAYS).glob("*"):
            if path.name not in named:
                shutil.rmtree(path, ignore_errors=True)

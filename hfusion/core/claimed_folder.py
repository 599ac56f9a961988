"""Folders that are claimed by this process until it ends, however it ends, or locked for one run.

A claim is a lock on the folder itself, so a folder is never visible without its lock for longer than `_claim` checks.
Where folders cannot be locked (Windows, some network file systems), folders of killed processes stay.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hfusion.core.errors import CheckpointError

try:
    import fcntl
except ImportError:  # On Windows.
    fcntl = None  # type: ignore[assignment]

_RUN = "hfusion-run-"


class ClaimedFolder:
    """A new folder in ``parent`` whose name starts with ``prefix``, created with permissions ``mode``."""

    def __init__(self, parent: Path, prefix: str, mode: int = 0o777) -> None:
        self._handle: int | None = None
        while True:
            self.path = parent / f"{prefix}{uuid.uuid4().hex}"
            self.path.mkdir(mode)
            if self._claim():
                return

    def _claim(self) -> bool:
        """Lock the folder; return False if another process removed it as abandoned before that."""
        if fcntl is None:
            return True
        try:
            self._handle = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            self.drop()
        except OSError:
            # Without locks, no process removes it as abandoned either.
            return True
        if not self.path.exists():
            self.drop()
        return self._handle is not None

    def drop(self) -> None:
        """It is no longer this process's own, or has another name."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def remove(self) -> None:
        """Remove the folder and all in it. Another process may have done so before."""
        if self.path.exists():
            shutil.rmtree(self.path)
        self.drop()


def lock_folder(folder: Path, run: str) -> Callable[[], None]:
    """Lock a folder for this process, and return the function that unlocks it. ``run``: what it is locked for.

    Raises CheckpointError if it is locked already.
    """
    if fcntl is None:
        return lambda: None
    handles = [os.open(folder, os.O_RDONLY)]

    def unlock() -> None:
        while handles:
            os.close(handles.pop())

    try:
        fcntl.flock(handles[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        unlock()
        raise CheckpointError(
            f"{folder} is in use by a {run} that goes on: wait for its end, or give another folder"
        ) from error
    except OSError:
        # On a file system without locks.
        unlock()
    # Forked children would hold the lock otherwise.
    os.register_at_fork(after_in_child=unlock)
    return unlock


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove this user's folders with this prefix whose process has ended."""
    for path in parent.glob(f"{prefix}*") if fcntl is not None else ():
        # An error: it is no folder, or its process runs, or another process is removing it.
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                if os.fstat(handle).st_uid == os.geteuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def run_folder(parent: Path | None = None) -> ClaimedFolder:
    """Create a private folder for files that only this process needs, and remove those of killed processes.

    Args:
        parent: where; None: the system's folder for temporary files.
    """
    root = Path(tempfile.gettempdir()) if parent is None else parent
    remove_abandoned(root, _RUN)
    # The number is for people who look: the lock shows whether the process is alive, also in other containers.
    return ClaimedFolder(root, f"{_RUN}{os.getpid()}-", 0o700)


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Context manager: the path of a `run_folder`, which is removed afterwards."""
    folder = run_folder(parent)
    try:
        yield folder.path
    finally:
        folder.remove()

"""Folders that are this process's own while it runs: the system drops its claim with it, however it ends.

A claim is a lock on the folder itself, so that there is no instant at which it is there without one that could be
missed. Where folders cannot be locked (Windows, some network file systems), nobody knows who has ended, and what killed
processes left stays.
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from pathlib import Path

try:
    import fcntl
except ImportError:  # On Windows.
    fcntl = None  # type: ignore[assignment]


class ClaimedFolder:
    """A new folder in ``parent`` whose name begins with ``prefix``; ``mode`` is that of a new folder."""

    def __init__(self, parent: Path, prefix: str, mode: int = 0o777) -> None:
        self._handle: int | None = None
        while True:
            self.path = parent / f"{prefix}{uuid.uuid4().hex}"
            self.path.mkdir(mode)
            if self._claim():
                return

    def _claim(self) -> bool:
        """Whether nobody took it for one that is abandoned before it was claimed."""
        if fcntl is None:
            return True
        try:
            self._handle = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.drop()
            return False
        except OSError:
            # No locks here: nobody can take it for abandoned either.
            return True
        if self.path.exists():
            return True
        self.drop()
        return False

    def drop(self) -> None:
        """It is no longer this process's own, or has another name."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove this user's folders with such names whose process has ended."""
    for path in parent.glob(f"{prefix}*") if fcntl is not None else ():
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        except OSError:
            # Somebody else removes it.
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            # Another process may remove it at the same time.
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)

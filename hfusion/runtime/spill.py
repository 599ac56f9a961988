"""The folder for what neither devices nor the host hold, empty again when the run ends, however it ends."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from hfusion.core.errors import SpillError

try:
    import fcntl
except ImportError:  # On Windows, where what killed runs have left stays.
    fcntl = None  # type: ignore[assignment]

_PREFIX = "hfusion-run-"
_LOCK = "lock"


class SpillFolder:
    """A folder of this run's own inside ``parent``, made when its first file is asked for.

    What killed runs have left there is removed: a run holds a lock that the system drops with its process.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._made_parent = False
        self._path: Path | None = None
        self._lock: IO[str] | None = None

    def file(self, name: str) -> Path:
        """The path of a new file. Raises SpillError where the folder cannot be made."""
        if self._path is None:
            try:
                self._path = self._make()
            except OSError as error:
                raise SpillError(
                    f"cannot make a folder for spilled state in {self._parent.absolute()}: {error.strerror}; name a "
                    "folder that can be written as the machine's disk"
                ) from error
        return self._path / f"{name}.safetensors"

    def close(self) -> None:
        """Remove the folder and all in it."""
        if self._lock is not None:
            self._lock.close()
        # Somebody may have cleaned up before.
        if self._path is not None and self._path.exists():
            shutil.rmtree(self._path)
        if self._made_parent:
            # Another run may use it by now, or have removed it.
            with suppress(OSError):
                self._parent.rmdir()
        self._lock = self._path = None

    def _make(self) -> Path:
        new = not self._parent.exists()
        self._parent.mkdir(parents=True, exist_ok=True)
        self._made_parent = new
        remove_abandoned(self._parent)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
        if fcntl is not None:
            self._lock = (path / "new").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Another run that sees the lock finds it held.
            (path / "new").rename(path / _LOCK)
        return path


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's runs whose process has ended."""
    for path in parent.glob(f"{_PREFIX}*") if fcntl is not None else ():
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            # Another run is making it, or removing it.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            # Another run may remove it at the same time.
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)

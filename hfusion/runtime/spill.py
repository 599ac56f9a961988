"""The folder for tensors that fit neither devices nor host memory; it is emptied however the run ends."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hfusion.core.claimed_folder import ClaimedFolder, run_folder
from hfusion.core.errors import SpillError


class SpillFolder:
    """A folder of this run inside ``parent``, created with its first file.

    Files of killed runs are removed.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._made_parent = False
        self._folder: ClaimedFolder | None = None

    def file(self, name: str) -> Path:
        """Return the path of a new file. Raises SpillError if the folder cannot be created."""
        if self._folder is None:
            try:
                self._folder = self._make()
            except OSError as error:
                raise SpillError(
                    f"cannot make a folder for spilled state in {self._parent.absolute()}: {error.strerror}; name a "
                    "folder that can be written as the machine's disk"
                ) from error
        return self._folder.path / f"{name}.safetensors"

    def close(self) -> None:
        """Remove the folder and its files."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()
        if self._made_parent:
            # Another run may use it by now, or have removed it.
            with suppress(OSError):
                self._parent.rmdir()

    def _make(self) -> ClaimedFolder:
        new = not self._parent.exists()
        self._parent.mkdir(parents=True, exist_ok=True)
        self._made_parent = new
        return run_folder(self._parent)

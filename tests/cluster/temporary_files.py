"""A folder for the temporary files of a test and of its processes, and checks that nothing stays."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def use_temporary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create ``folder``, and let temporary files of this process and of those that it starts be there."""
    folder.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def processes_of(text: str, parent: int | None = None) -> list[int]:
    """Return the processes with ``text`` in their command line, children of ``parent`` if given."""
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().decode(errors="replace")
            status = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if text in command and status[0] != "Z" and parent in (None, int(status[1])):
            processes.append(int(path.name))
    return sorted(processes)


def emptied_temporary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As `use_temporary`; no process and no file is left in the end."""
    before = shared_memory()
    yield use_temporary(folder, monkeypatch)
    assert nothing_left(folder, before)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def nothing_left(temporary: Path, before: set[str]) -> bool:
    """No processes, temporary files or shared memory; other programs may have some of that for a while."""
    assert multiprocessing.active_children() == []
    # Python and torch have theirs until this process ends.
    assert list(temporary.glob("hfusion*")) == []
    for _ in range(100):
        if shared_memory() <= before:
            return True
        time.sleep(0.2)
    return False


# The environment variables under which tests start Ray on this machine.

# Ray lowers the priority of its workers (15) below that of whatever else runs: beside four busy processes on two cores
# they get a thirtieth of a core.
RAY_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}

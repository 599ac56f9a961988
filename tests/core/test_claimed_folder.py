from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hfusion.core.claimed_folder import ClaimedFolder, remove_abandoned, run_folder, temporary_folder


def test_only_folders_of_ended_processes_are_removed(tmp_path: Path) -> None:
    claimed = ClaimedFolder(tmp_path, "run-")
    for name in ("run-left", "run-empty", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run-left" / "inside").write_bytes(b"x")
    (tmp_path / "run-file").touch()
    remove_abandoned(tmp_path, "run-")
    assert {path.name for path in tmp_path.iterdir()} == {claimed.path.name, "other", "run-file"}
    claimed.drop()
    remove_abandoned(tmp_path, "run-")
    assert not claimed.path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_links_and_folders_of_other_users_are_not_removed(tmp_path: Path) -> None:
    """In a folder shared by many users, a user who may remove the files of others does not."""
    tmp_path.chmod(0o1777)
    elsewhere, foreign, linked = (tmp_path / name for name in ("elsewhere", "run-theirs", "run-link"))
    for path in (elsewhere, foreign):
        path.mkdir()
    os.chown(foreign, 12345, -1)
    linked.symlink_to(elsewhere)
    os.mkfifo(tmp_path / "run-pipe")
    remove_abandoned(tmp_path, "run-")
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "run-theirs", "run-link", "run-pipe"}


KILLED = """
import os, signal
from hfusion.core.claimed_folder import run_folder
run_folder().path.joinpath("data").write_bytes(b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_run_removes_the_temporary_files_of_a_killed_one(tmp_path: Path) -> None:
    """Files of a run that goes on stay."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment)
    assert done.returncode == -signal.SIGKILL
    (abandoned,) = tmp_path.iterdir()
    assert (abandoned / "data").exists()
    first = run_folder(tmp_path)
    with temporary_folder(tmp_path) as second:
        assert {*tmp_path.iterdir()} == {first.path, second}
    first.remove()
    assert not [*tmp_path.iterdir()]

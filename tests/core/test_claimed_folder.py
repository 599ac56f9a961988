from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hfusion.core.claimed_folder import ClaimedFolder, remove_abandoned, run_folder, temporary_folder


def test_what_ended_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    here = ClaimedFolder(tmp_path, "run-")
    for name in ("run-left", "run-empty", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run-left" / "inside").write_bytes(b"x")
    (tmp_path / "run-file").touch()
    remove_abandoned(tmp_path, "run-")
    assert {path.name for path in tmp_path.iterdir()} == {here.path.name, "other", "run-file"}
    here.drop()
    remove_abandoned(tmp_path, "run-")
    assert not here.path.exists()


def test_who_took_it_for_abandoned_does_not_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between making a folder and claiming it, another process may remove it."""
    made, mkdir = list[Path](), Path.mkdir

    def raced(self: Path, *arguments: object) -> None:
        mkdir(self)
        made.append(self)
        if len(made) < 3:
            remove_abandoned(tmp_path, "run-")

    monkeypatch.setattr(Path, "mkdir", raced)
    found = ClaimedFolder(tmp_path, "run-")
    assert len(made) == 3
    assert [*tmp_path.iterdir()] == [found.path] == [made[-1]]
    found.drop()


def test_a_renamed_folder_is_still_claimed_until_it_is_dropped(tmp_path: Path) -> None:
    found = ClaimedFolder(tmp_path, "run-", 0o700)
    assert found.path.stat().st_mode & 0o777 == 0o700
    moved = found.path.rename(tmp_path / "run-moved")
    remove_abandoned(tmp_path, "run-")
    assert moved.exists()
    found.drop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_is_of_another_user_or_a_link_is_left_alone(tmp_path: Path) -> None:
    """A folder that is shared by many: whoever may remove what others left, does not."""
    tmp_path.chmod(0o1777)
    elsewhere, theirs, linked = (tmp_path / name for name in ("elsewhere", "run-theirs", "run-link"))
    for path in (elsewhere, theirs):
        path.mkdir()
    os.chown(theirs, 12345, -1)
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
    """And nothing of a run that goes on."""
    place = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=place)
    assert done.returncode == -signal.SIGKILL
    (abandoned,) = tmp_path.iterdir()
    assert (abandoned / "data").exists()
    first = run_folder(tmp_path)
    with temporary_folder(tmp_path) as second:
        assert {*tmp_path.iterdir()} == {first.path, second}
    first.remove()
    assert not [*tmp_path.iterdir()]

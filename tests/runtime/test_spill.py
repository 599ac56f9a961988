from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from hfusion.core.errors import SpillError
from hfusion.runtime.spill import SpillFolder, remove_abandoned


@pytest.mark.parametrize("exists", [False, True])
def test_the_folder_is_there_from_the_first_file_to_the_end(tmp_path: Path, exists: bool) -> None:
    parent = tmp_path / "spill"
    if exists:
        parent.mkdir()
    folder = SpillFolder(parent)
    assert parent.exists() is exists
    files = [folder.file("0-0"), folder.file("0-1")]
    assert [file.name for file in files] == ["0-0.safetensors", "0-1.safetensors"]
    assert len({file.parent for file in files}) == 1
    assert files[0].parent.parent == parent
    files[0].write_bytes(b"x")
    folder.close()
    assert parent.exists() is exists
    assert not files[0].parent.exists()
    folder.close()


def test_a_folder_without_files_is_never_made(tmp_path: Path) -> None:
    SpillFolder(tmp_path / "spill").close()
    assert not list(tmp_path.iterdir())


def test_runs_share_a_disk(tmp_path: Path) -> None:
    parent = tmp_path / "spill"
    first, second = SpillFolder(parent), SpillFolder(parent)
    (mine, other) = (folder.file("0-0") for folder in (first, second))
    for file in (mine, other):
        file.write_bytes(b"x")
    assert mine.parent != other.parent
    first.close()
    assert other.exists()
    second.close()
    assert not list(parent.glob("*"))


def test_what_ended_runs_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    running = SpillFolder(tmp_path)
    here = running.file("0-0").parent
    left, making = tmp_path / "hfusion-run-left", tmp_path / "hfusion-run-making"
    for path in (left, making, tmp_path / "other"):
        path.mkdir()
        (path / "0-0.safetensors").write_bytes(b"x")
    (left / "lock").touch()
    (tmp_path / "hfusion-run-file").touch()
    remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {here.name, making.name, "other", "hfusion-run-file"}
    running.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_is_of_another_user_or_no_folder_of_a_run_is_left_alone(tmp_path: Path) -> None:
    """A folder that is shared by many: whoever may remove what others left, does not."""
    tmp_path.chmod(0o1777)
    elsewhere, theirs, linked = (tmp_path / name for name in ("elsewhere", "hfusion-run-theirs", "hfusion-run-link"))
    for path in (elsewhere, theirs):
        path.mkdir()
        (path / "lock").touch()
    os.chown(theirs, 12345, -1)
    (theirs / "lock").chmod(0o666)
    linked.symlink_to(elsewhere)
    pipe = tmp_path / "hfusion-run-pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "lock")
    folder = SpillFolder(tmp_path)
    folder.file("0-0")
    folder.close()
    assert (theirs / "lock").exists()
    assert (elsewhere / "lock").exists()
    assert linked.is_symlink()


def test_a_parent_that_others_use_meanwhile_stays(tmp_path: Path) -> None:
    parent = tmp_path / "spill"
    folder = SpillFolder(parent)
    folder.file("0-0")
    (parent / "other").touch()
    folder.close()
    assert [path.name for path in parent.iterdir()] == ["other"]


def test_the_lock_is_held_as_soon_as_it_can_be_seen(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path)
    path = folder.file("0-0").parent
    with (path / "lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert [file.name for file in path.iterdir()] == ["lock"]
    folder.close()


@pytest.mark.parametrize("place", ["file", "file/inside/it"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    folder = SpillFolder(tmp_path / place)
    with pytest.raises(SpillError, match=r"cannot make a folder for spilled state in .*file.*: .*; name a folder"):
        folder.file("0-0")
    folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_somebody_removed(tmp_path: Path) -> None:
    parent = tmp_path / "spill"
    folder = SpillFolder(parent)
    path = folder.file("0-0").parent
    (path / "lock").unlink()
    path.rmdir()
    parent.rmdir()
    folder.close()
    assert not list(tmp_path.iterdir())

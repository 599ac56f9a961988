from __future__ import annotations

from pathlib import Path

import pytest

from hfusion.core.errors import SpillError
from hfusion.runtime.spill import SpillFolder


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


def test_a_parent_that_others_use_meanwhile_stays(tmp_path: Path) -> None:
    parent = tmp_path / "spill"
    folder = SpillFolder(parent)
    folder.file("0-0")
    (parent / "other").touch()
    folder.close()
    assert [path.name for path in parent.iterdir()] == ["other"]


@pytest.mark.parametrize("location", ["file", "file/inside/it"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, location: str) -> None:
    (tmp_path / "file").touch()
    folder = SpillFolder(tmp_path / location)
    with pytest.raises(SpillError, match=r"cannot make a folder for spilled state in .*file.*: .*; name a folder"):
        folder.file("0-0")
    folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

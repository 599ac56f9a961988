"""The cache folder: where it is, whom it belongs to, and which files there are not believed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hfusion.device.cache import (
    MAX_BYTES,
    cache_folder,
    read,
    read_sealed,
    write,
    write_sealed,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
STRANGER = 12345


@contextmanager
def masked(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277])
def test_only_the_user_reads_and_writes_whatever_the_umask(mask: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "hfusion" / "kernels.so"
    path.parent.parent.mkdir()
    with masked(mask & 0o077):
        write(path.parent / "first", b"")
    with masked(mask):
        write(path, b"x")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read(path) == b"x"
    assert {entry.name for entry in path.parent.iterdir()} == {"first", "kernels.so"}


HOMES: dict[str, tuple[dict[str, str | None], str]] = {
    "named": ({"XDG_CACHE_HOME": "{}/a", "HOME": "{}/b"}, "{}/a/hfusion"),
    "by default": ({"XDG_CACHE_HOME": None, "HOME": "{}/b"}, "{}/b/.cache/hfusion"),
    "relative": ({"XDG_CACHE_HOME": "a", "HOME": "{}/b"}, "{}/b/.cache/hfusion"),
    "empty": ({"XDG_CACHE_HOME": "", "HOME": "{}/b"}, "{}/b/.cache/hfusion"),
}


@pytest.mark.parametrize("name", HOMES)
def test_location_of_the_cache_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, expected = HOMES[name]
    monkeypatch.chdir(tmp_path)
    set_all(variables, tmp_path, monkeypatch)
    assert cache_folder() == Path(expected.format(tmp_path))


def set_all(variables: dict[str, str | None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in variables.items():
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value.format(folder))


def stranger(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, STRANGER, -1)


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def dangling(folder: Path) -> None:
    folder.symlink_to(folder.parent / "nowhere")


FOLDERS = [
    pytest.param(stranger, f"it belongs to user {STRANGER}", marks=needs_root),
    pytest.param(open_to_all, r"others can write to it \(mode 777\): chmod go-w"),
    pytest.param(Path.touch, "Not a directory"),
    pytest.param(dangling, ""),
]


@pytest.mark.parametrize(("make", "why"), FOLDERS)
def test_an_unusable_folder_is_reported_once(
    make: Callable[[Path], None], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make(tmp_path / "hfusion")
    with pytest.warns(UserWarning, match=f"no cache folder can be used .*hfusion: .*{why}") as records:
        private = cache_folder()
    assert len(records) == 1
    assert private.parent != tmp_path
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert cache_folder() == private
    write(private / "kept", b"x")
    assert read(private / "kept") == b"x"
    (private / "kept").unlink()


def given_away(path: Path) -> None:
    os.chown(path, STRANGER, -1)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def another(path: Path) -> None:
    """A file of ours under a name that is not its own."""
    write_sealed(path.with_name("other"), b"other")
    path.with_name("other").rename(path)


ATTACKS = {
    "given away": pytest.param(given_away, f"it belongs to user {STRANGER}", marks=needs_root),
    "writable": pytest.param(lambda path: path.chmod(0o620), "others can write to it"),
    "a link": pytest.param(linked, "symbolic links"),
    "a pipe": pytest.param(pipe, "it is no regular file"),
    "a folder": pytest.param(folder, "it is no regular file"),
    "huge": pytest.param(lambda path: os.truncate(path, 1 << 40), f"more than {MAX_BYTES:,} bytes"),
    "cut short": pytest.param(lambda path: os.truncate(path, path.stat().st_size // 2), "damaged, or was cut short"),
    "empty": pytest.param(lambda path: os.truncate(path, 0), "damaged, or was cut short"),
    "flipped": pytest.param(flipped, "damaged, or was cut short"),
    "another": pytest.param(another, "damaged, or was cut short"),
}


@pytest.mark.parametrize(("attack", "why"), ATTACKS.values(), ids=ATTACKS)
def test_untrusted_files_are_refused(attack: Callable[[Path], None], why: str, tmp_path: Path) -> None:
    path = tmp_path / "hfusion" / "kept"
    write_sealed(path, b"content of some length")
    assert read_sealed(path) == b"content of some length"
    attack(path)
    with pytest.raises(OSError, match=why) as error:
        read_sealed(path)
    assert error.value.strerror
    if path.is_dir():
        with pytest.raises(OSError, match="directory"):
            write_sealed(path, b"new")
        path.rmdir()
    write_sealed(path, b"new")
    assert read_sealed(path) == b"new"

"""Compiling C with the machine's own compiler; that there is none is tested where it is used."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hfusion.device import native
from hfusion.device.cache import write_sealed
from hfusion.ops import rnn
from hfusion.optim import native_kernels as kernels
from tests.device.test_cache import ATTACKS


@pytest.mark.parametrize("source", [kernels.SOURCE, rnn.SOURCE], ids=lambda source: source.stem)
def test_a_library_is_compiled_once(source: Path, compiler: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert isinstance(native.build(source, compiler, folder), ctypes.CDLL)
    (binary,) = folder.iterdir()
    stamp = binary.stat().st_mtime_ns
    assert isinstance(native.build(source, compiler, folder), ctypes.CDLL)
    assert binary.stat().st_mtime_ns == stamp
    assert list(folder.iterdir()) == [binary]


@pytest.fixture
def seven(tmp_path: Path) -> Path:
    """C that is compiled in no time."""
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }")
    return source


@pytest.mark.usefixtures("compiler")
def test_a_library_is_compiled_meanwhile(seven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HFUSION_NATIVE", raising=False)
    calls: list[str] = []
    for _ in range(2):
        native.compile_in_background(seven, lambda: calls.append("before"))
    assert calls == ["before"]
    begun = native._pending_libraries[seven]
    library = native.library(seven)
    assert isinstance(library, ctypes.CDLL)
    assert library is begun.result()
    assert native.library(seven) is library
    assert seven not in native._pending_libraries


def test_a_failed_background_compilation_is_reported_when_the_library_is_requested(
    seven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.delenv("HFUSION_NATIVE", raising=False)
    native.compile_in_background(seven, lambda: None)
    assert "failed" in str(native.library(seven))


def test_a_library_that_does_not_load_is_compiled_again(seven: Path, compiler: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert isinstance(native.build(seven, compiler, folder), ctypes.CDLL)
    (binary,) = folder.iterdir()
    write_sealed(binary, b"no library")
    library = native.build(seven, compiler, folder)
    assert isinstance(library, ctypes.CDLL)
    assert library.seven() == 7
    assert binary.stat().st_size > 1000


@pytest.mark.parametrize(("attack", "why"), ATTACKS.values(), ids=ATTACKS)
@pytest.mark.filterwarnings("ignore:cannot keep compiled kernels")
def test_a_library_that_is_not_believed_is_compiled_again(
    attack: Callable[[Path], None], why: str, seven: Path, compiler: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    native.build(seven, compiler, folder)
    (binary,) = folder.iterdir()
    attack(binary)
    with pytest.warns(UserWarning, match=rf"the compiled kernels in {binary} are built again: .*{why}"):
        library = native.build(seven, compiler, folder)
    assert isinstance(library, ctypes.CDLL)
    assert library.seven() == 7
    if binary.is_dir():
        binary.rmdir()
        native.build(seven, compiler, folder)
    assert isinstance(native.build(seven, compiler, folder), ctypes.CDLL)


def test_code_of_a_stranger_does_not_run(seven: Path, compiler: list[str], tmp_path: Path) -> None:
    """A library of that name whose constructor would leave a file."""
    folder, mark, evil = tmp_path / "cache", tmp_path / "mark", tmp_path / "evil.c"
    native.build(seven, compiler, folder)
    (binary,) = folder.iterdir()
    evil.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) void run(void) {{ fclose(fopen("{mark}", "w")); }}'
    )
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", str(binary), str(evil)], check=True)
    with pytest.warns(UserWarning, match="are built again: it is damaged"):
        native.build(seven, compiler, folder)
    assert not mark.exists()


def test_a_loaded_library_works_after_its_file_is_truncated(seven: Path, compiler: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    native.build(seven, compiler, folder)
    library = native.build(seven, compiler, folder)
    (binary,) = folder.iterdir()
    os.truncate(binary, 0)
    assert isinstance(library, ctypes.CDLL)
    assert library.seven() == 7


def test_a_folder_that_cannot_be_written_is_warned_of(seven: Path, compiler: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.warns(UserWarning, match=r"are built again: Not a directory"),
        pytest.warns(UserWarning, match=r"cannot keep compiled kernels in .*: Not a directory; .* XDG_CACHE_HOME"),
    ):
        library = native.build(seven, compiler, tmp_path / "file")
    assert isinstance(library, ctypes.CDLL)
    assert library.seven() == 7

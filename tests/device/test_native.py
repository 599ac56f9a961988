"""Compiling C with the machine's own compiler; that there is none is tested where it is used."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hfusion.device import native
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


def test_a_folder_that_cannot_be_written_is_warned_of(seven: Path, compiler: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.warns(UserWarning, match=r"are built again: Not a directory"),
        pytest.warns(UserWarning, match=r"cannot keep compiled kernels in .*: Not a directory; .* XDG_CACHE_HOME"),
    ):
        library = native.build(seven, compiler, tmp_path / "file")
    assert isinstance(library, ctypes.CDLL)
    assert library.seven() == 7

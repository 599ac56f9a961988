"""Compiling C with the machine's own compiler; that there is none is tested where it is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hfusion import native
from hfusion.ops import rnn
from hfusion.optim import native as kernels
from hfusion.runtime import copying


@pytest.fixture(params=[kernels.SOURCE, rnn.SOURCE, copying.SOURCE], ids=lambda source: source.stem)
def source(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_a_library_is_compiled_once(source: Path, compiler: list[str], tmp_path: Path) -> None:
    made = native.build(source, compiler, tmp_path / "cache")
    assert isinstance(made, Path)
    stamp = made.stat().st_mtime_ns
    assert native.build(source, compiler, tmp_path / "cache") == made
    assert made.stat().st_mtime_ns == stamp
    assert os.listdir(made.parent) == [made.name]


def test_a_library_that_does_not_load_is_compiled_again(source: Path, compiler: list[str], tmp_path: Path) -> None:
    made = native.build(source, compiler, tmp_path)
    assert isinstance(made, Path)
    made.unlink()
    made.write_bytes(b"no library")
    assert native.build(source, compiler, tmp_path) == made
    assert native._loads(made)

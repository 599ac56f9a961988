"""Compiled steps on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.step import program_cache
from hfusion.step.compile_request import CompileRequest
from hfusion.step.program_cache import NoProgram
from hfusion.step.train_step import TrainStep
from tests.step.test_train_step import needs_compiler


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache folder in which programs are kept."""
    monkeypatch.delenv("HFUSION_CHECK")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hfusion"


def made() -> TrainStep:
    torch.manual_seed(0)
    fused = hf.fuse([nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)) for _ in range(2)])
    return hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.1), compile=True)


def trained(step: TrainStep) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [4, 4, 6, 3]
    return [step(torch.randn(n, 4, generator=generator), torch.zeros(n, dtype=torch.long)) for n in sizes]


@needs_compiler
def test_a_second_step_finds_what_the_first_has_compiled(folder: Path) -> None:
    first, second = made(), made()
    losses = [trained(first), trained(second)]
    assert (first.compilations, second.compilations) == (1, 0)
    assert str(first.report()) == str(second.report())
    for expected, actual in zip(*losses, strict=True):
        assert torch.equal(expected, actual)
    programs = [path for path in folder.iterdir() if path.name.startswith("step-")]
    assert {path.suffix for path in programs} == {".json", ".so"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in programs)

    # A library that was damaged is not loaded, but compiled again.
    (library,) = (path for path in programs if path.suffix == ".so")
    library.write_bytes(library.read_bytes()[:-1])
    third = made()
    with pytest.warns(UserWarning, match="made anew"):
        losses.append(trained(third))
    assert third.compilations == 1
    for expected, actual in zip(losses[0], losses[2], strict=True):
        assert torch.equal(expected, actual)


def compile_request() -> CompileRequest:
    return CompileRequest({"forward": 1})


@pytest.mark.parametrize("damage", ["others write", "not JSON", "code", "a link"])
def test_a_file_that_is_not_believed(damage: str, folder: Path) -> None:
    assert program_cache.find(compile_request()) is None
    assert program_cache.keep(compile_request(), NoProgram("too many operators"))
    assert program_cache.find(compile_request()) == NoProgram("too many operators")
    (path,) = folder.glob("step-*.json")
    if damage == "others write":
        path.chmod(0o666)
    elif damage == "not JSON":
        program_cache.write_sealed(path, b"{")
    elif damage == "code":
        row = {"trained": [], "operators": [], "sizes": [], "code": "__import__('os')", "takes": 1, "library": ""}
        program_cache.write_sealed(path, json.dumps({"programs": [row], "size": None, "kinds": [0]}).encode())
    else:
        path.rename(folder / "other")
        path.symlink_to(folder / "other")
    with pytest.warns(UserWarning, match="is made anew"):
        assert program_cache.find(compile_request()) is None


def test_a_key_of_other_circumstances(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {compile_request().key(program_cache.circumstances())}
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    keys.add(compile_request().key(program_cache.circumstances()))
    monkeypatch.undo()
    keys.add(compile_request().key(program_cache.circumstances()))
    keys.add(CompileRequest({"forward": 2}).key(program_cache.circumstances()))
    assert len(keys) == 3


def test_the_oldest_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "MAX_FOLDER", 150)
    for number in range(3):
        program_cache.keep(CompileRequest({"forward": number}), NoProgram("x" * 20))
        for path in folder.glob("step-*"):
            os.utime(path, (path.stat().st_mtime - 100,) * 2)
    assert program_cache.find(CompileRequest({"forward": 0})) is None
    assert program_cache.find(CompileRequest({"forward": 2})) == NoProgram("x" * 20)

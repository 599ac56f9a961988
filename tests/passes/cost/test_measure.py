"""Measured choices: kept and used again, of no effect on results, on the random state or on a broken cache."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.device.cache import cache_folder, write, write_json
from hfusion.passes.cost import times


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Net(nn.Module):
    """Every family that is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.point, self.line = nn.Conv2d(4, 4, 1), nn.Conv1d(4, 4, 3, padding=1)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.max_pool2d(self.point(self.norm(self.conv(x)).relu()), 2)
        h = self.line(h.flatten(2)).mT
        q, k, v = self.qkv(h).view(len(x), -1, 3, 2, 2).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(h.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]


def models() -> list[nn.Module]:
    return [Net().double() for _ in range(3)]


X = torch.randn(2, 2, 6, 6, dtype=torch.float64)


def kept() -> Path:
    (path,) = cache_folder().iterdir()
    return path


def functions(fused: hf.FusedModule, operator: str) -> set[str]:
    return {row.lowering.fn.__name__ for row in fused.report().parts[0].rows if row.operator == operator}


def equals_alone(fused: hf.FusedModule, alone: list[nn.Module]) -> None:
    """Outputs, gradients, buffers of one training call."""
    alone = copy.deepcopy(alone)
    output, expected = fused(X), torch.stack([model(X) for model in alone])
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-11)
    output.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in fused.named_parameters():
        rows = torch.stack([model.get_parameter(name).grad for model in alone])  # type: ignore[misc]
        torch.testing.assert_close(parameter.grad, rows, rtol=1e-9, atol=1e-11)
    for name, buffer in fused.named_buffers():
        torch.testing.assert_close(buffer, torch.stack([model.get_buffer(name) for model in alone]))


def test_tuning_changes_no_result_and_leaves_the_random_state() -> None:
    alone = models()
    fused = hf.fuse(alone, tune=True)
    before = torch.get_rng_state()
    equals_alone(fused, alone)
    assert torch.equal(torch.get_rng_state(), before)


def test_measured_times_are_kept_and_reported() -> None:
    fused = hf.fuse(models(), tune=True)
    fused(X)
    seconds = json.loads(kept().read_text())["seconds"]
    names = {key.split(" | ")[0] for key in seconds}
    conv = [name for name in names if name.startswith("aten.conv2d.default")]
    assert {name.split()[1] for name in conv} == {"side_by_side", "channels_last", "product"}
    assert any("attend_written_out" in name for name in names)
    text = str(fused.report())
    assert text.count("measured") >= 6
    part = fused.report().parts[0]
    for row in part.rows:
        if row.operator in ("conv2d.default", "linear.default", "scaled_dot_product_attention.default"):
            assert row.cost.measured is not None
            assert row.cost.lost
            assert row.lowering not in row.cost.lost or row.operator == "conv2d.default"


@pytest.mark.parametrize("function", ["side_by_side", "channels_last", "product"])
def test_later_processes_choose_by_the_times_that_were_kept(function: str) -> None:
    alone = models()
    hf.fuse(alone, tune=True)(X)
    content = json.loads(kept().read_text())
    for key in content["seconds"]:
        if key.startswith("aten.conv2d.default"):
            content["seconds"][key] = 1e-9 if function in key else 1.0
    kept().write_text(json.dumps(content))
    fused = hf.fuse(alone, tune=True)
    equals_alone(fused, alone)
    assert function in functions(fused, "conv2d.default")
    assert json.loads(kept().read_text()).keys() == {"machine", "seconds"}


def test_build_tunes_and_a_copy_stays_tuned() -> None:
    fused = hf.build(Net, seeds=[0, 1], tune=True)
    twin = copy.deepcopy(fused)
    twin(X.float())
    assert "measured" in str(twin.report())


@pytest.mark.parametrize("damage", ["", "[]", '{"machine": {}}', "null", '{"machine": {}, "seconds": {"a": "b"}}'])
def test_a_broken_cache_is_reported_and_replaced(damage: str) -> None:
    hf.fuse(models(), tune=True)(X)
    kept().write_text(damage)
    fused = hf.fuse(models(), tune=True)
    with pytest.warns(UserWarning, match=r"the measured times of operators in .* are no valid JSON"):
        fused(X)
    assert "measured" in str(fused.report())
    hf.fuse(models(), tune=True)(X)


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    fused = hf.fuse(models(), tune=True)
    with pytest.warns(UserWarning, match=r"no cache folder can be used.*XDG_CACHE_HOME"):
        fused(X)
    assert "measured" in str(fused.report())


@pytest.mark.parametrize("attack", [os.mkfifo, os.mkdir])
def test_a_cache_that_cannot_be_read_is_reported(attack: Callable[[Path], None]) -> None:
    hf.fuse(models(), tune=True)(X)
    path = kept()
    path.unlink()
    attack(path)
    fused = hf.fuse(models(), tune=True)
    with pytest.warns(UserWarning, match="cannot be read: it is no regular file"):
        fused(X)
    assert "measured" in str(fused.report())


ABSURD = ["NaN", "Infinity", "1e999", "-1", "0", '"1e-3"', "true", "null", "1e300", "1" + 400 * "0", 9000 * "["]


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: str(value)[:9])
def test_absurd_times_are_not_believed(value: str, tmp_path: Path) -> None:
    path = tmp_path / "hfusion" / "times.json"
    write_json(path, {"machine": {}, "seconds": {"a": 1e-3}})
    assert times._read(path, {}) == ({"a": 1e-3}, "")
    write(path, f'{{"machine": {{}}, "seconds": {{"a": {value}}}}}'.encode())
    assert times._read(path, {}) == ({}, "are no valid JSON of them")


def test_nothing_is_measured_unasked() -> None:
    fused = hf.fuse(models())
    fused(X)
    assert "measured" not in str(fused.report())
    assert not list(cache_folder().iterdir())


def test_a_first_call_without_gradients_is_tuned() -> None:
    fused = hf.fuse(models(), tune=True)
    fused.eval()
    with torch.inference_mode():
        fused(X)
    assert "measured" in str(fused.report())

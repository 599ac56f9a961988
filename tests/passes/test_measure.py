"""Measured choices: kept and used again, of no effect on results, on the random state or on a broken cache."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.device.cache import cache_folder


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


@pytest.mark.parametrize("damage", ["", "[]", '{"machine": {}}', "null", '{"machine": {}, "seconds": {"a": "b"}}'])
def test_a_broken_cache_is_reported_and_replaced(damage: str) -> None:
    hf.fuse(models(), tune=True)(X)
    kept().write_text(damage)
    fused = hf.fuse(models(), tune=True)
    with pytest.warns(UserWarning, match=r"the measured times of operators in .* are no valid JSON"):
        fused(X)
    assert "measured" in str(fused.report())
    hf.fuse(models(), tune=True)(X)

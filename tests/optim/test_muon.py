"""Muon: matrices only, each member's orthogonalised separately; torch does so in bfloat16, so it rounds coarsely."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hfusion as hf
from tests.optim.arrays import Array, Per, run, start

SHAPES = [(4, 3), (3, 5), (6, 6)]
CASES: dict[str, dict[str, Any]] = {
    "lr": {"lr": Per(0.1, 0.5)},
    "numbers": {"lr": 0.1, "momentum": Per(0.95, 0.5), "weight_decay": Per(0.5, 0.1), "eps": Per(1e-7, 1e5)},
    "plain": {"lr": Per(0.1, 0.5), "nesterov": False, "ns_steps": 3},
    "original": {"lr": Per(0.1, 0.5), "adjust_lr_fn": "original"},
    "like-adamw": {"lr": Per(0.1, 0.5), "adjust_lr_fn": "match_rms_adamw", "ns_coefficients": (2.0, -1.5, 0.5)},
}
ALL = pytest.mark.parametrize("options", CASES.values(), ids=CASES)
# A step is lr (0.1) times elements of at most 1, in bfloat16: one rounding of them is 0.1 / 256. Sums of products in
# another order differ by less, measured 5e-5 after 3 steps.
ROUNDING = 4e-4


def assert_equal(array: Array, steps: int) -> None:
    for index, param in enumerate(array.params):
        alone = torch.stack([params[index].detach() for params in array.members])
        torch.testing.assert_close(param.detach(), alone, rtol=0.0, atol=steps * ROUNDING)


@ALL
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_alone(options: dict[str, Any], members: int, dtype: torch.dtype) -> None:
    array = Array(members, SHAPES, dtype)
    fused, alone = start("Muon", options, array)
    before = [param.detach().clone() for param in array.params]
    run(array, fused, alone, 3)
    assert_equal(array, 3)
    assert all(
        (param - old).abs().amax(dim=(1, 2)).min() > 1e-3 for param, old in zip(array.params, before, strict=True)
    )
    for optimizer, params, member in zip(alone, array.members, range(members), strict=True):
        for stack, parameter in zip(array.params, params, strict=True):
            expected = optimizer.state[parameter]["momentum_buffer"]
            torch.testing.assert_close(fused.state[stack]["momentum_buffer"][member], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adjust_lr_fn": "none"}, "adjust_lr_fn='none': it must be None, 'original' or 'match_rms_adamw'"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients=\(1\.0, 2\.0\): give three numbers"),
        ({"ns_steps": 100}, "ns_steps=100: it must be at least 0 and below 100"),
        ({"momentum": [0.9, -0.1, 0.9]}, "momentum of member 1 is -0.1"),
    ],
)
def test_bad_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.optim.Muon(Array(3, SHAPES).params, **options)

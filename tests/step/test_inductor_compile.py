"""Compiled steps that cannot be called past torch's wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.step import compiled_step
from hfusion.torch_private.cpp_entry import entry_of
from tests.step.test_train_step import needs_compiler

Results = Callable[[list[Tensor]], list[Tensor]]


def other_value(results: list[Tensor]) -> list[Tensor]:
    results[1][1, 2] += 1
    return results


def other_strides(results: list[Tensor]) -> list[Tensor]:
    return [results[0], results[1].transpose(1, 2).contiguous().transpose(1, 2), *results[2:]]


def steps(count: int) -> tuple[list[Tensor], str]:
    torch.manual_seed(0)
    fused = hf.fuse([nn.Linear(4, 3) for _ in range(4)])
    step = hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.1), parts=2, compile=True)
    losses = [step(torch.ones(5, 4), torch.tensor([0, 1, 2, 1, 0])) for _ in range(count)]
    return losses, str(step.report())


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_value, r"[-\d.]+ instead of [-\d.]+ in the gradient of tensor 0, f32\[[24],3,4\] .*, at \[1, 2, 0\]"),
        (other_strides, r"tensor 0 as f32\[[24],3,4\] of strides \[12, 1, 3\] instead of .* of strides \[12, 4, 1\]"),
    ],
)
def test_what_differs_is_told_and_the_wrappers_are_used(
    change: Results, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, report = steps(4)
    assert "on 2 threads" in report

    def changed(*arguments: Any) -> Any:
        entry = entry_of(*arguments)
        return entry and (lambda *tensors: change(list(entry(*tensors))))

    monkeypatch.setattr(compiled_step, "entry_of", changed)
    with pytest.warns(UserWarning, match=f"in one part, exact but slower: .* gives .*{message}; report it"):
        losses, report = steps(4)
    assert "in one part: its program is more than C++" in report
    for loss, expected_loss in zip(losses, expected, strict=True):
        torch.testing.assert_close(loss, expected_loss)

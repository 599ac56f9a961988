"""The values that a compiled program stores, of all that the operators of a program compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.passes.cost.cost import line
from hfusion.step.memory_budget import _rates


class Model(nn.Module):
    def __init__(self, does: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does
        self.norm, self.first, self.second, self.third = nn.BatchNorm1d(8), *(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


def pointwise(self: Model, x: Tensor) -> Tensor:
    return self.second(F.hardswish(self.norm(self.first(x))))


def chain(self: Model, x: Tensor) -> Tensor:
    return self.second(((self.first(x) * 2).tanh() + 1).exp())


def residual(self: Model, x: Tensor) -> Tensor:
    first = self.first(x)
    total = first + self.second(first.relu())
    return self.third(total.relu()) + total


@pytest.mark.parametrize(
    ("does", "stored"),
    [
        # The norm is computed again from the result of the first layer.
        (pointwise, ["linear 0-4", "hardswish 4-5", "linear 5-6"]),
        (chain, ["linear 0-4", "exp 4-5", "linear 5-6"]),
        # The sum is computed again from both of its terms, which are needed as long as it is.
        (residual, ["linear 0-6", "relu 1-2", "linear 2-6", "relu 4-5", "linear 5-6", "add 6-7"]),
    ],
)
def test_pointwise_values_are_computed_again(does: Callable[[Model, Tensor], Tensor], stored: list[str]) -> None:
    fused = hf.fuse([Model(does) for _ in range(2)])
    program = fused.compiled(Arguments.of((torch.randn(64, 8),), {})).program
    compiled = line(program, 64, _rates(), is_compiled=True)
    large = [value for value in compiled.storages if value.size == 2 * 64 * 8 * 4]
    texts = [
        f"{compiled.steps[value.born].where.split('(')[1].split()[0]} {value.born}-{value.last}" for value in large
    ]
    assert texts == stored
    assert len(line(program, 64, _rates()).storages) > len(compiled.storages)

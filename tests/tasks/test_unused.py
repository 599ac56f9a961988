"""A parameter that a member has not used in a step stays as it is, also where the array is cut into shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.core.test_gradient_usage import Before, Exit
from tests.trained import BATCHES, MEMBERS, Way, assert_same, fused, machine, plain, planned, task


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.exit, self.last = nn.Linear(4, 4), nn.Linear(4, 4), Exit(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).tanh()).tanh()
        y: Tensor = self.last(self.exit(h, x))
        return y


def loader() -> list[tuple[Any, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    sizes = (BATCHES, MEMBERS, 6, 4)
    inputs, targets = (torch.randn(*sizes, generator=draw, dtype=torch.float64) for _ in range(2))
    return [(hf.stacked(x), y[0]) for x, y in zip(inputs, targets, strict=True)]


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("make", [Skipping, Before])
def test_a_parameter_that_a_member_skips_stays_as_it_is(
    make: Callable[[], nn.Module], count: int, resident: bool
) -> None:
    array, settings, batches = fused(make), Way(), loader()
    expected = plain(array, settings, batches, F.mse_loss)
    tasks = [task(array, settings, batches, loss=F.mse_loss)]
    on = machine()
    assert_same([array], tasks, [expected], on, planned(tasks, on, [count], [resident]))

"""Compiled steps of operators that put a part of a tensor into it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.step.test_train_step import needs_compiler

PUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "index_add": lambda y: y.index_add(1, torch.tensor([1, 1, 3]), y[:, :3]),
    "index_copy": lambda y: y.index_copy(1, torch.tensor([1, 2, 3]), y[:, :3]),
    "index_put": lambda y: y.index_put((torch.tensor([1, 2, 2]),), y[:3], accumulate=True),
    "slice_scatter": lambda y: y.slice_scatter(y[:, :-1], 1, 1, 6),
    "select_scatter": lambda y: y.t().select_scatter(y[0], 0, 1).t() + y.select_scatter(y[:, 2], 1, 0),
    "diagonal_scatter": lambda y: y.diagonal_scatter(y[0]),
}


class Puts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # One each, since a tensor that is used later is not written to.
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in PUTS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([put(layer(x)).sin() for put, layer in zip(PUTS.values(), self.layers, strict=True)], 1)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out.sum(1) - target).square().mean()


@needs_compiler
@pytest.mark.parametrize("count", [1, 2])
def test_values_are_read_before_they_are_overwritten(count: int) -> None:
    torch.manual_seed(0)
    members = [Puts().double() for _ in range(count)]
    fused = hf.fuse(copy.deepcopy(members))
    step = hf.train_step(fused, loss_of, hf.optim.SGD(fused.parameters(), lr=0.01), compile=True)
    x, target = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    alone = [torch.optim.SGD(member.parameters(), lr=0.01) for member in members]
    for _ in range(3):
        losses = step(x, target)
        for row, (member, optimizer) in enumerate(zip(members, alone, strict=True)):
            optimizer.zero_grad()
            loss = loss_of(member(x), target)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(losses[row], loss.detach(), rtol=1e-9, atol=1e-12)
    assert "program" in str(step.report())

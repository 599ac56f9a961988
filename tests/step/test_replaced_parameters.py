"""A step whose optimizer has none of its array's parameters any more says so; `fully_shard` is in tests/cluster."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from tests.step.test_train_step import needs_compiler


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
def test_parameters_that_were_replaced(compiled: bool) -> None:
    fused = hf.build(lambda: nn.Linear(4, 3), seeds=range(3))
    step = hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.1), compile=compiled)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    for _ in range(3):
        step(x, y)
    assert ("program" in step.report().rows[0].how) is compiled
    for name, param in list(fused.named_parameters()):
        setattr(fused, name, nn.Parameter(param.detach().clone()))
    before = [param.detach().clone() for param in fused.parameters()]
    with pytest.raises(hf.FusionError, match="the parameters of the fused Linear were replaced after train_step was"):
        step(x, y)
    assert all(map(torch.equal, before, fused.parameters()))


def test_frozen_parameters_were_not_replaced() -> None:
    fused = hf.build(lambda: nn.Linear(4, 3), seeds=range(3))
    optimizer = hf.optim.SGD([fused.weight], lr=0.1)
    step = hf.train_step(fused, F.cross_entropy, optimizer, compile=False)
    fused.weight.requires_grad_(False)
    assert step(torch.randn(5, 4), torch.randint(3, (5,))).shape == (3,)

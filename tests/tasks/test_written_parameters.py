"""Frozen parameters that forward writes are state of a run, as buffers are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.trained import machine, planned


class Counting(nn.Module):
    """Counts its calls in a frozen parameter, and scales by it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1)
        return self.out(self.fc(x).relu() / self.calls.detach().clone())  # type: ignore[no-any-return]


@pytest.mark.parametrize("resident", [True, False])
def test_a_frozen_parameter_that_forward_writes_is_trained_state(resident: bool) -> None:
    models = [Counting().double() for _ in range(2)]
    alone = copy.deepcopy(models)
    minibatches = [(torch.randn(4, 8, dtype=torch.float64), torch.randint(3, (4,))) for _ in range(3)]
    task = hf.Task(hf.fuse(models), F.cross_entropy, lambda params: hf.optim.SGD(params, lr=0.1), minibatches, name="a")
    trained = hf.train(task, machine(), plan=planned([task], machine(), [1], [resident]))["a"].models
    for model, other in zip(trained, alone, strict=True):
        optimizer = torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.1)
        for x, target in minibatches:
            optimizer.zero_grad()
            F.cross_entropy(other(x), target).backward()
            optimizer.step()
        assert model.calls == other.calls == 3
        torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-11)

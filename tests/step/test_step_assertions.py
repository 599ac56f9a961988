"""Checks that only raise, in compiled steps: a step is one program, and raises what the members raise."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.alone import normal


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.fc(x))
        if (self.fc.bias > 100).any():
            raise ValueError(f"the bias is {self.fc.bias.max():.0f}")
        return h


def checked_loss(y: Tensor, target: Tensor) -> Tensor:
    if (target < 0).any():
        raise ValueError("a negative target")
    return F.mse_loss(y, target)


def check_step(step: Callable[..., Tensor], models: list[Checked], x: Tensor, target: Tensor) -> None:
    expected = []
    for model in models:
        model.zero_grad()
        loss = checked_loss(model(x), target)
        loss.backward()
        expected.append(loss.detach())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(step(x, target), torch.stack(expected))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_with_checks_is_compiled_and_raises_as_a_member(parts: int) -> None:
    models = [Checked() for _ in range(4)]
    fused, alone = hf.fuse(models), copy.deepcopy(models)
    step = hf.train_step(fused, checked_loss, hf.optim.SGD(fused.parameters(), lr=0.1), parts=parts, compile=True)
    x, target = normal(6, 4), normal(6, 3).abs()
    for _ in range(3):
        check_step(step, alone, x, target)
    assert "program of" in str(step.report())
    before = {name: tensor.detach().clone() for name, tensor in fused.state_dict().items()}
    with pytest.raises(ValueError, match=r"^a negative target$"):
        step(x, -target)
    for name, parameter in fused.named_parameters():
        assert torch.equal(parameter, before[name])
    fused.load_state_dict(before)
    with torch.no_grad():
        fused.fc.bias[2] += 200  # type: ignore[union-attr, index, operator]
    with pytest.raises(ValueError, match=r"^the bias is (199|200|201)$"):
        step(x, target)
    # The members before the one that raises have run, as in a loop over them.
    changed = (fused.norm.num_batches_tracked != before["norm.num_batches_tracked"]).tolist()  # type: ignore[union-attr]
    assert changed == [True, True, True, False]
    fused.load_state_dict(before)
    check_step(step, alone, x, target)
    assert "eager" not in str(step.report())

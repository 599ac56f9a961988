"""Targets of sizes that a loss broadcasts: warned of as alone, and where they were surely meant to be stacked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

B, N = 3, 5


def checked(output: Tensor, target: Tensor) -> Tensor:
    if (target < -1e9).any():
        raise ValueError
    return F.mse_loss(output, target)


LOSSES: dict[str, Callable[..., Any]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "module": nn.MSELoss(),
    "of the user": lambda output, target: F.mse_loss(output, target) + 1,
    "that checks values": checked,
    "that draws": lambda output, target: F.mse_loss(F.dropout(output, 0.5), target),
}


def told(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_torchs_own_warnings(loss: Callable[..., Any]) -> None:
    outputs = torch.randn(B, N, 1)
    for target in (torch.randn(N), torch.randn(B, N, N)):
        alone = told(lambda target=target: loss(outputs[0], target))
        messages = told(lambda target=target: hf.per_model(loss)(outputs, target))
        assert len(alone) == 1
        assert [text for text in messages if "hf.stacked" not in text] == alone
    stacked = told(lambda: hf.per_model(loss)(outputs, hf.stacked(torch.randn(B, N))))
    assert stacked == told(lambda: loss(outputs[0], torch.randn(N)))


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize("loss", [F.mse_loss, lambda output, target: ((output - target) ** 2).mean()])
def test_a_target_for_each_member_that_was_not_stacked(loss: Callable[..., Any]) -> None:
    outputs, target = torch.randn(B, N), torch.randn(B, N)
    message = rf"has shape \[{B}, {N}\], a member's output \[{N}\].*give hf.stacked\(target\)"
    with pytest.warns(UserWarning, match=message) as caught:
        hf.per_model(loss)(outputs, target)
    assert all(warning.filename == __file__ for warning in caught)


class Quiet(nn.Module):
    """Counts its calls in a buffer, so that a test sees extra calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return ((output - target) ** 2).mean()


def test_fitting_shapes_do_not_warn() -> None:
    outputs = torch.randn(B, N)
    classes = torch.randn(B, N, N)
    for call in (
        lambda: hf.per_model(F.mse_loss)(outputs, torch.randn(N)),
        lambda: hf.per_model(F.mse_loss)(outputs, hf.stacked(torch.randn(B, N))),
        lambda: hf.per_model(F.cross_entropy)(classes, torch.randint(N, (N,))),
        lambda: hf.per_model(F.cross_entropy)(classes, hf.stacked(torch.randint(N, (B, N)))),
        lambda: hf.per_model(F.mse_loss)(torch.randn(B, B, B), torch.randn(B, B)),
        lambda: hf.per_model(lambda output: output.mean())(outputs),
        lambda: hf.per_model(lambda output, scale: (output * scale).mean())(outputs, torch.tensor(2.0)),
        lambda: hf.per_model(Quiet())(outputs[..., None], torch.randn(N)),
    ):
        assert told(call) == []

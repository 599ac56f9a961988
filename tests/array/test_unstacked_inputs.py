"""Inputs that hold a batch for each member, and were not wrapped in hf.stacked."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf

B, N = 3, 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return torch.softmax(x @ x.transpose(-1, -2), -1) @ x


class Flattening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(N * 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x.flatten(1))
        return y


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout(0.1), nn.Linear(4, 1))


def test_an_mlp_warns_once_and_blames_the_caller() -> None:
    fused = hf.fuse([mlp() for _ in range(B)])
    with pytest.warns(
        UserWarning, match=rf"3 members sees the whole input of shape \[{B}, {N}, 2\].*hf\.stacked"
    ) as caught:
        outputs = fused(torch.randn(B, N, 2))
    assert outputs.shape == (B, B, N, 1)
    assert [warning.filename for warning in caught] == [__file__]
    fused(torch.randn(B, N + 1, 2))
    copy.deepcopy(fused.eval())(hf.stacked(torch.randn(B, N, 2)))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (mlp, (B, 2)),  # B samples
        (mlp, (B + 1, N, 2)),  # a batch of another size
        (Attention, (B, N, 2)),  # B sequences
        (lambda: nn.Conv1d(N, 2, 1), (B, N, 2)),
        (lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(N)), (B, N, 2)),
        (Flattening, (B, N, 2)),  # B images
    ],
)
def test_no_warning_where_the_input_is_one_batch(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    fused = hf.fuse([make() for _ in range(B)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused(torch.randn(shape))

"""Batches of no samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hfusion as hf

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "samples": (lambda: nn.BatchNorm1d(3), (0, 3)),
    "positions": (lambda: nn.BatchNorm1d(3), (2, 3, 0)),
    "images": (lambda: nn.BatchNorm2d(3, affine=False), (0, 3, 4, 4)),
    "before a layer": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)), (0, 3)),
    "without statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (0, 3)),
}


@pytest.mark.parametrize("name", NORMS)
def test_batches_of_no_samples_leave_statistics_alone(name: str) -> None:
    make, shape = NORMS[name]
    members = [make() for _ in range(2)]
    array, x = hf.fuse(members), torch.ones(shape)
    torch.testing.assert_close(array(x), torch.stack([member(x) for member in members]))
    for key, stack in array.state_dict().items():
        torch.testing.assert_close(stack, torch.stack([member.state_dict()[key] for member in members]))

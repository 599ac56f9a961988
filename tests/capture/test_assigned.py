"""Buffers that forward assigns anew, at the root and below it, beside submodules that run in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.alone import assert_alone, normal
from tests.capture.test_fallback import Square


def average(self: Any, x: Tensor) -> Tensor:
    h: Tensor = x + self.mean
    self.mean = 0.5 * self.mean + x.detach().mean(0)
    return h


def hand_back_the_old(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    old = self.mean
    self.mean = x.detach().mean(0)
    return x + self.mean, old


def assign_and_write(self: Any, x: Tensor) -> Tensor:
    old = self.mean
    self.mean = x.detach().mean(0)
    self.mean.mul_(2)
    old.add_(1)
    self.mean = self.mean + old
    return x * self.mean


def assign_a_view(self: Any, x: Tensor) -> Tensor:
    self.mean = self.mean.view(2, 2).t().reshape(4) + 1
    self.mean = self.mean.view(-1)
    return x * self.mean


class Part(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4).double())
        self.does = forward

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Any], loops: bool, used: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.ModuleList([Part(forward)])])
        self.fc = nn.Linear(4, 4).double()
        self.last = Square() if loops else nn.Identity()
        self.used = used

    def forward(self, x: Tensor) -> Any:
        h = self.parts[0][0](self.fc(x))
        return (self.last(x @ self.fc.weight), h) if self.used else self.last(self.fc(x))


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("does", [average, hand_back_the_old, assign_and_write, assign_a_view])
def test_the_buffer_has_what_was_assigned(does: Callable[..., Any], loops: bool, used: bool) -> None:
    fused = assert_alone([Net(does, loops, used) for _ in range(2)], normal(3, 4), normal(3, 4), normal(5, 4))
    assert ("loop over members, last" in str(fused.report())) == loops
    assert "loop over members, parts" not in str(fused.report())


@pytest.mark.parametrize("other", [lambda mean: mean.float(), lambda mean: mean[:2], lambda mean: None])
def test_another_kind_of_tensor_is_refused(other: Callable[[Tensor], Any]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = x + self.mean
        self.mean = other(x.detach().mean(0))
        return h

    with pytest.raises(hf.FusionError, match=r"forward (changes|assigns|takes away).*mean"):
        hf.fuse([Net(forward, False, True) for _ in range(2)])(normal(3, 4))

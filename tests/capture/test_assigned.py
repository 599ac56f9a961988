"""Buffers that forward reassigns, at the root and below it, next to submodules that run in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.alone import assert_alone, normal
from tests.capture.test_eager_fallbacks import Square


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
    def __init__(self, forward: Callable[..., Any], loops: bool, is_read: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.ModuleList([Part(forward)])])
        self.fc = nn.Linear(4, 4).double()
        self.last = Square() if loops else nn.Identity()
        self.used = is_read

    def forward(self, x: Tensor) -> Any:
        h = self.parts[0][0](self.fc(x))
        return (self.last(x @ self.fc.weight), h) if self.used else self.last(self.fc(x))


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("does", [average, hand_back_the_old, assign_and_write, assign_a_view])
def test_the_buffer_has_what_was_assigned(does: Callable[..., Any], loops: bool, is_read: bool) -> None:
    fused = assert_alone([Net(does, loops, is_read) for _ in range(2)], normal(3, 4), normal(3, 4), normal(5, 4))
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


def untie(self: Any, x: Tensor) -> Tensor:
    self.other = self.other.clone()
    return x * self.mean + self.other


def untie_once(self: Any, x: Tensor) -> Tensor:
    if self.other is self.mean:
        self.mean = self.mean + 1
    self.other += 1
    return x * self.mean + self.other


def untie_parameters(self: Any, x: Tensor) -> Tensor:
    if self.again.weight is self.fc.weight:
        self.again.weight = nn.Parameter(self.fc.weight.detach().clone())
    h: Tensor = self.again(x)
    return h


class Tied(nn.Module):
    def __init__(self, does: Callable[..., Tensor], loops: bool) -> None:
        super().__init__()
        self.does, self.square = does, Square() if loops else nn.Identity()
        self.fc, self.again = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.again.weight = self.fc.weight
        self.register_buffer("mean", torch.ones(4, dtype=torch.float64))
        self.register_buffer("other", self.mean)

    def forward(self, x: Tensor) -> Tensor:
        return self.square(self.does(self, self.fc(x)))


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("does", [untie, untie_once, untie_parameters])
def test_a_tie_that_forward_undoes_is_refused(does: Callable[..., Tensor], loops: bool) -> None:
    with pytest.raises(hf.FusionError, match=r"are one tensor, and forward makes them two.*call the models once"):
        hf.fuse([Tied(does, loops) for _ in range(2)])(normal(3, 4))


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("does", [untie_once, untie_parameters])
def test_a_tie_that_is_undone_before_is_none(does: Callable[..., Tensor], loops: bool) -> None:
    models = [Tied(does, loops) for _ in range(2)]
    for model in models:
        model(normal(3, 4))
    assert_alone(models, normal(3, 4), normal(3, 4))


class Overlapping(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        base = torch.ones(5, dtype=torch.float64)
        self.writes = writes
        self.register_buffer("mean", base[:4])
        self.register_buffer("other", base[1:])

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.other += 1
        return x * self.mean + self.other


def test_buffers_that_overlap_may_be_read_only() -> None:
    assert_alone([Overlapping(False) for _ in range(2)], normal(3, 4), grads=False)
    with pytest.raises(hf.FusionError, match=r"writes into the buffer other.*memory of another tensor"):
        hf.fuse([Overlapping(True) for _ in range(2)])(normal(3, 4))


def test_trained_parameters_must_not_share_memory() -> None:
    def shared() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight.data = model[0].weight.data
        return model

    with pytest.raises(hf.FusionError, match=r"model 0: 0\.weight and 1\.weight share memory"):
        hf.fuse([shared(), shared()])


def test_columns_of_one_matrix_do_not_overlap() -> None:
    def columns() -> nn.Module:
        model, base = nn.Module(), torch.randn(3, 4)
        model.left, model.right = nn.Parameter(base[:, :2]), nn.Parameter(base[:, 2:])
        return model

    assert len(hf.fuse([columns(), columns()])) == 2

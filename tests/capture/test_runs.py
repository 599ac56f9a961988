"""How often forward of a member runs before the first output: few runs answer all questions of a capture."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8).double()
        self.second = nn.Linear(8, 3).double()

    def hidden(self, x: Tensor) -> Tensor:
        return self.first(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.hidden(x))


class Branch(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.hidden(x))
        return y / 2 if y.sum() > 0 else y


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2 if x.sum() > 0 else x


class BranchInside(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.halved = Halved()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.halved(self.hidden(x)))


class LeavesResult(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.hidden(x).detach()
        return self.second(self.last * 2)


class Mask(Mlp):
    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.linspace(0, 1, len(x), dtype=x.dtype).unsqueeze(1)
        return self.second(self.hidden(x) * self.mask)


class StaleMask(Mlp):
    """Keeps the mask of the first call, whatever the length."""

    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.linspace(0, 1, len(x), dtype=x.dtype).unsqueeze(1)
        return self.second(self.hidden(x) * self.mask[: len(x)])


class LastShape(Mlp):
    """Leaves a result of which the next call reads the shape only."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        scale = 2 if self.last is not None and len(self.last) != len(x) else 1
        self.last = x * 3
        return self.second(self.hidden(x)) * scale


class LastValue(Mlp):
    """Leaves a result whose values decide, in rare cases only."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        rare = torch.zeros(()) if self.last is None else (self.last > 1e9).any()
        self.last = x * 3
        return self.second(self.hidden(x)) * (1 + rare.double())


def runs(member: nn.Module, x: Tensor) -> int:
    """How often code of forward began; seen from outside, as a counter in forward would be state."""
    code, count = type(member).forward.__code__, 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is code

    fused = hf.fuse([member])
    sys.setprofile(profile)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused(x)
    finally:
        sys.setprofile(None)
    return count


# Of these, one is the trace and one the check of the array, or the first call where all of forward runs as it is.
MOST = {Mlp: 4, Branch: 6, BranchInside: 7, LeavesResult: 6, Mask: 8}


@pytest.mark.parametrize("kind", MOST)
def test_forward_runs_few_times_before_the_first_output(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert runs(kind(), torch.randn(5, 4, dtype=torch.float64)) <= MOST[kind]


@pytest.mark.parametrize("make", [StaleMask, LastShape, LastValue])
def test_what_a_later_call_reads_is_state_all_the_same(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    with pytest.raises(hf.FusionError, match=r"forward keeps values in the Python attribute (mask|last)"):
        hf.fuse([make(), make()])(torch.randn(5, 4, dtype=torch.float64))

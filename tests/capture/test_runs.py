"""How often forward of a member runs before the first output: few runs answer all questions of a capture."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.capture.eager_runs import ALIKE, Outcome, difference


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


class MaskAndResult(Mask):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.penalty = y.square().mean()
        return y


class MaskPerLength(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.linspace(0, 1, len(x), dtype=x.dtype).unsqueeze(1)
        return self.second(self.hidden(x) * self.masks[len(x)])


class Residual(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.second(h + self.inner(h))


class Encoder(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.hidden(self.layer(x.unsqueeze(1)).squeeze(1)))


class Recurrent(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.hidden(self.lstm(x.unsqueeze(1))[0].squeeze(1)))


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


class ShortestSoFar(Mlp):
    shortest = 10**6

    def forward(self, x: Tensor) -> Tensor:
        self.shortest = min(self.shortest, len(x))
        return self.second(self.hidden(x)) * self.shortest


class LastNumber(Mlp):
    """Leaves an integer that decides where it is large."""

    last = 0

    def forward(self, x: Tensor) -> Tensor:
        scale = 2 if self.last > 10_000 else 1
        self.last = int(x.detach().abs().sum() * 10)
        return self.second(self.hidden(x)) * scale


class LastValue(Mlp):
    """Leaves a result whose values decide, in rare cases only."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        rare = torch.zeros(()) if self.last is None else (self.last > 1e9).any()
        self.last = x * 3
        return self.second(self.hidden(x)) * (1 + rare.double())


def runs(members: list[nn.Module], x: Tensor) -> int:
    """How often code of forward began; seen from outside, as a counter in forward would be state."""
    code, count = type(members[0]).forward.__code__, 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is code

    fused = hf.fuse(members)
    sys.setprofile(profile)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused(x)
    finally:
        sys.setprofile(None)
    return count


KINDS = [Mlp, Residual, Encoder, Recurrent, Branch, BranchInside, LeavesResult, Mask, MaskAndResult, MaskPerLength]


@pytest.mark.parametrize("kind", KINDS)
def test_forward_runs_few_times_before_the_first_output(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    # Of these, one is the trace and one the check of the array, or the first call where all of forward runs as it is.
    assert runs([kind()], torch.randn(5, 4, dtype=torch.float64)) <= 6


def test_further_members_run_once_in_the_check_of_the_array() -> None:
    torch.manual_seed(0)
    assert runs([Mask() for _ in range(4)], torch.randn(5, 4, dtype=torch.float64)) <= 6 + 3


@pytest.mark.parametrize("training", [True, False])
def test_a_mask_beside_a_result_is_no_state(training: bool) -> None:
    torch.manual_seed(0)
    members = [MaskAndResult().train(training) for _ in range(2)]
    fused = hf.fuse(members)
    for rows in (5, 7, 3, 5):
        x = torch.randn(rows, 4, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "forward of MaskAndResult leaves results in the attribute penalty, which")
            torch.testing.assert_close(fused(x), torch.stack([member(x) for member in members]))


@pytest.mark.parametrize("special_value", [math.nan, math.inf])
def test_outcomes_differ_in_what_is_no_number(special_value: float) -> None:
    outcomes = [Outcome((torch.tensor([1.0, value]),), {}) for value in (special_value, 2.0)]
    assert difference(outcomes[0], outcomes[1], ALIKE) == "output 0"
    assert difference(outcomes[0], outcomes[0], ALIKE) is None


@pytest.mark.parametrize("make", [StaleMask, LastShape, LastValue, LastNumber, ShortestSoFar])
def test_values_that_a_later_call_reads_are_state(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    with pytest.raises(hf.FusionError, match=r"forward keeps values in the Python attribute (mask|last|shortest)"):
        hf.fuse([make(), make()])(torch.randn(5, 4, dtype=torch.float64))

"""Regions without gradients: what they compute has no history, what they give back as it was keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfusion.compiler.fusion_report import FusionReport
from tests.alone import assert_alone, call, net, normal
from tests.capture.test_export import Sevenfold

HANDED_BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout of nothing": lambda h: F.dropout(h, 0.0),
    "dropout in evaluation": lambda h: F.dropout(h, 0.5, training=False),
    "dropout in place of nothing": lambda h: F.dropout(h, 0.0, inplace=True),
    "dropout of channels": lambda h: F.feature_alpha_dropout(h, 0.0),
    "alpha dropout in place": lambda h: F.alpha_dropout(h, 0.0, inplace=True),
    "to": lambda h: h.to(torch.float64),
    "double": lambda h: h.double(),
    "cpu": lambda h: h.cpu(),
    "type_as": lambda h: h.type_as(torch.ones(1, dtype=torch.float64)),
    "contiguous": lambda h: h.contiguous(),
    "flatten": lambda h: h.flatten(1),
    "positive": lambda h: +h,
    "real": lambda h: h.real,
    "conj": lambda h: h.conj(),
    "at least": lambda h: torch.atleast_1d(h),
    "sum to its size": lambda h: h.sum_to_size(h.shape),
    "the value itself": lambda h: h,
    "identity": nn.Identity(),
    "several": lambda h: F.dropout(h.contiguous().to(torch.float64), 0.0),
}


def kept(change: Callable[[Tensor], Tensor], mode: Any = torch.no_grad) -> Callable[..., Any]:
    """Uses what the region gives, what it was given, and something that is computed of it inside."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        h = self.fc(x).tanh()
        with mode():
            k = change(h)
            far = k * 2 + h
        return k, h * 3, k * far, far

    return forward


@pytest.mark.parametrize("name", HANDED_BACK)
def test_returned_values_keep_their_gradient(name: str) -> None:
    make = net(kept(HANDED_BACK[name]))
    fused = assert_alone([make() for _ in range(2)], normal(4, 4), normal(5, 4))
    assert not _loops(fused.report())


def test_an_input_is_given_back() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(False):
            return F.dropout(F.dropout(x, 0.0, inplace=True), 0.0), self.fc.weight.contiguous()

    make = net(forward)
    for grad in (True, False):
        fused = assert_alone([make() for _ in range(2)], normal(4, 4).requires_grad_(grad))
        assert not _loops(fused.report())


def test_gradients_that_are_turned_on_again_inside() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        h = self.fc(x)
        with torch.no_grad():
            k = h.contiguous()
            with torch.enable_grad():
                again = k * h
                with torch.no_grad():
                    last = F.dropout(again, 0.0)
            return h * again, last, again

    make = net(forward)
    assert not _loops(assert_alone([make() for _ in range(2)], normal(4, 4)).report())


class Handing(nn.Module):
    """Returns the result of an opaque function, with its input, its parameter, or a value that needs gradients."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives = gives
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        far = Sevenfold.apply(x * self.w)
        if self.gives == "input":
            return x.contiguous(), far
        if self.gives == "own":
            return self.w, far
        if self.gives == "computed":
            with torch.enable_grad():
                return Sevenfold.apply(x * self.w), far
        return far * 2, far


@pytest.mark.parametrize("gives", ["input", "own", "computed", "nothing"])
def test_a_looped_submodule_without_gradients(gives: str) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        h = self.fc(x)
        with torch.no_grad():
            k, far = self.inner(h)
        return k, h * k, far

    def prepare(module: nn.Module) -> None:
        module.inner = Handing(gives).double()

    make = net(forward, prepare)
    fused = assert_alone([make() for _ in range(2)], normal(4, 4), call(normal(4, 4)))
    assert _loops(fused.report()) == {"inner"}


def _loops(report: FusionReport) -> set[str]:
    """The submodules that run member by member."""
    parts = [line.partition("loop over members, ")[2].partition(":")[0] for line in str(report).splitlines()]
    return set(filter(None, parts))

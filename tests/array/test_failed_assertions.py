"""Checks of forward and of losses that only raise stay beside a fused program, and raise what a member raises."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

import hfusion as hf
from tests.alone import assert_alone, normal
from tests.asserting import all_finite, none_negative
from tests.forwards.table import linear, module


@pytest.fixture(autouse=True)
def validated() -> Iterator[None]:
    """torch.compile switches the checks of torch.distributions off for the process; these tests need them."""
    before = distributions.Distribution._validate_args
    distributions.Distribution.set_default_validate_args(True)
    yield
    distributions.Distribution.set_default_validate_args(before)


def raises(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.fc(x)
    if h.isnan().any() or (h > 1e6).any():
        raise ValueError(f"not a number: {h.shape}")
    return h


def asserts(self: Any, x: Tensor) -> Tensor:
    all_finite(x)
    h: Tensor = self.fc(x)
    return h


def asserts_by_torch(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.fc(x)
    torch._assert(torch.isfinite(h).all(), "not finite")
    return h


def in_a_region(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.fc(x)
    with torch.no_grad():
        if torch.isnan(h).any().item():
            raise RuntimeError("not a number")
    return h


def normal_distribution(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    log_prob: Tensor = distributions.Normal(h, F.softplus(h)).log_prob(x)
    return log_prob + distributions.Independent(distributions.Normal(h, 1.0), 1).entropy()[:, None]


def categorical(self: Any, x: Tensor) -> Tensor:
    policy = distributions.Categorical(logits=self.fc(x))
    return policy.log_prob(x.abs().nan_to_num().long().clamp(0, 3)[:, 0]) + policy.entropy()


CHECKS = {f.__name__: f for f in (raises, asserts, asserts_by_torch, in_a_region, normal_distribution, categorical)}


def broken() -> Tensor:
    return normal(5, 4).index_fill(0, torch.tensor([2]), torch.nan)


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_costs_no_loop_and_raises_as_a_member(name: str) -> None:
    make = module(CHECKS[name], fc=linear)
    models = [make() for _ in range(3)]
    array = assert_alone(models, normal(5, 4), normal(3, 4))
    with pytest.raises(Exception) as alone:  # noqa: PT011
        models[0](broken())
    for _ in range(2):
        with pytest.raises(alone.type) as fused:
            array(broken())
        assert str(fused.value).partition("\n")[0] == str(alone.value).partition("\n")[0]
    x = normal(5, 4)
    torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]))
    report = str(array.report())
    assert "loop over members" not in report
    assert "expect.default" in report


def normalized(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.norm(self.fc(x))
    if h.max() > 1.3:
        raise ValueError("large")
    return h


def test_buffers_are_as_alone_where_a_check_fails_after_they_were_written() -> None:
    x = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], dtype=torch.float64) * torch.ones(4, dtype=torch.float64)
    models = [module(normalized, fc=linear, norm=lambda: nn.BatchNorm1d(4))()]
    array, alone = hf.fuse(models), copy.deepcopy(models[0])
    for batch in (x, torch.cat([x, 50 * x[:1], x]), x):
        for each in (array, alone):
            if len(batch) == 4:
                each(batch)
            else:
                with pytest.raises(ValueError, match="large"):
                    each(batch)
        for name, buffer in alone.named_buffers():
            torch.testing.assert_close(array.get_buffer(name)[0], buffer)


def checked_loss(y: Tensor, target: Tensor) -> Tensor:
    none_negative(target)
    return F.gaussian_nll_loss(y, target, y.square() + 1)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "own": (checked_loss, "a negative target"),
    "of torch": (lambda y, t: F.gaussian_nll_loss(y, t, t), "var has negative entry/entries"),
    "of a distribution": (lambda y, t: -distributions.Normal(y, t).log_prob(y).mean(), "Expected parameter scale"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_check_of_a_loss(name: str) -> None:
    loss, message = LOSSES[name]
    losses, y, target = hf.per_model(loss), normal(3, 5, 4), normal(5, 4).abs() + 0.1
    for _ in range(2):
        torch.testing.assert_close(losses(y, target), torch.stack([loss(row, target) for row in y]))
        with pytest.raises((AssertionError, ValueError), match=message):
            losses(y, -target)
    assert "loop over members" not in str(losses.report())

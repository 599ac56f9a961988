"""A function per member equals the function called on each member's row, also when what it reads changes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.alone import Call, call, normal
from tests.forwards.table import Sevenfold

TARGET = torch.tensor([0, 3, 1, 2, 0])


def outputs() -> Tensor:
    return normal(3, 5, 4).requires_grad_()


def check(per_model: Callable[..., Any], function: Callable[..., Any], y: Tensor, more: Call = call()) -> None:  # noqa: B008
    """Values and gradients against one call per row."""
    actual = per_model(y, *more.args, **more.kwargs)
    rows = [more.of_member(b) for b in range(len(y))]
    expected = torch.stack([function(y[b], *args, **kwargs) for b, (args, kwargs) in enumerate(rows)])
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    grads = [torch.autograd.grad(loss.sin().sum(), y)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


CASES: dict[str, tuple[Callable[..., Any], Call]] = {
    "cross entropy": (F.cross_entropy, call(TARGET)),
    "reduction none": (F.cross_entropy, call(TARGET, reduction="none")),
    "own targets": (F.cross_entropy, call(hf.stacked(torch.randint(4, (3, 5), generator=torch.Generator())))),
    "mse": (F.mse_loss, call(normal(5, 4))),
    "module": (nn.CrossEntropyLoss(weight=torch.rand(4).double(), label_smoothing=0.1), call(TARGET)),
    "partial": (functools.partial(F.cross_entropy, label_smoothing=0.2), call(TARGET)),
    "lambda": (lambda y, t, k: F.mse_loss(y, t) * k, call(normal(5, 4), 3)),
    "custom Function": (lambda y: Sevenfold.apply(y).sum(), call()),
    "branch on values": (lambda y: y.sum() * (2 if y.sum() > 0 else 3), call()),
    "mask": (lambda y: y[y > 0].sum(), call()),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_rows(name: str) -> None:
    function, more = CASES[name]
    per_model = hf.per_model(function)
    for _ in range(2):
        check(per_model, function, outputs(), more)
    check(per_model, function, outputs() * 2, more)


class Config:
    beta = 1.0

    def loss(self, y: Tensor) -> Tensor:
        return y.sum() * self.beta

    __call__ = loss


SETTINGS = {"beta": 1.0}
FACTOR = 1.0


def reads_globals(y: Tensor) -> Tensor:
    return y.sum() * SETTINGS["beta"] * FACTOR


def set_global(value: float) -> None:
    SETTINGS["beta"] = value
    globals()["FACTOR"] = value


def closure() -> tuple[Callable[..., Any], Callable[[float], Any]]:
    beta, weights = 1.0, torch.ones(4, dtype=torch.float64)

    def function(y: Tensor) -> Tensor:
        return (y * weights).sum() * beta

    def change(value: float) -> None:
        nonlocal beta, weights
        beta = value
        weights = weights + value
        weights.mul_(2)

    return function, change


def attribute(thing: Any, function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[float], Any]]:
    return function, lambda value: setattr(thing, "beta", value)


CONFIG, OTHER = Config(), Config()
CHANGES: dict[str, tuple[Callable[..., Any], Callable[[float], Any]]] = {
    "closure": closure(),
    "globals": (reads_globals, set_global),
    "object": attribute(CONFIG, lambda y: y.sum() * CONFIG.beta),
    "method": attribute(CONFIG, CONFIG.loss),
    "callable": attribute(OTHER, OTHER),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_what_it_reads_are_seen(name: str) -> None:
    function, change = CHANGES[name]
    per_model = hf.per_model(function)
    for value in [3.0, 5.0, 0.5, *range(2, 20)]:
        check(per_model, function, outputs())
        change(value)
        check(per_model, function, outputs())


class Own:
    def __init__(self, beta: float) -> None:
        self.beta = beta

    def loss(self, y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y, t) * self.beta


WEIGHT = torch.rand(4, dtype=torch.float64)
# How people write a loss inside the loop: a function for every call, by a number that it reads.
REMADE: dict[str, Callable[[float], Callable[..., Any]]] = {
    "function": lambda k: F.cross_entropy,
    "partial": lambda k: functools.partial(F.cross_entropy, label_smoothing=k / 10),
    "partial of a tensor": lambda k: functools.partial(F.cross_entropy, weight=WEIGHT, label_smoothing=k / 10),
    "lambda": lambda k: lambda y, t: F.cross_entropy(y, t) * k,
    "zeros": lambda k: lambda y, t, zero=k * 0.0: F.cross_entropy(y, t) * (3 + math.copysign(1, zero)),
    "module": lambda k: nn.CrossEntropyLoss(label_smoothing=k / 10),
    "module with a tensor": lambda k: nn.CrossEntropyLoss(weight=WEIGHT * k),
    "bound method": lambda k: Own(k).loss,
}


@pytest.mark.parametrize("name", REMADE)
def test_a_recreated_function_reuses_its_program(name: str) -> None:
    programs: set[Any] = set()
    for k in (1.0, 2.0, -1.0 if name in ("lambda", "zeros", "bound method") else 3.0) * 3:
        mapped = hf.per_model(REMADE[name](k))
        check(mapped, REMADE[name](k), outputs(), call(TARGET))
        programs |= set(mapped.programs)
    assert len(programs) <= 3


def test_conversion_of_a_loss_module() -> None:
    module = nn.CrossEntropyLoss(weight=torch.rand(4))
    per_model = hf.per_model(module)
    per_model(torch.randn(3, 5, 4), TARGET)
    module.double()
    check(per_model, module, outputs(), call(TARGET))
    module.label_smoothing, module.ignore_index = 0.3, 0
    check(per_model, module, outputs(), call(TARGET))


def test_gradients_reach_tensors_of_a_closure() -> None:
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    hf.per_model(lambda y: (y * weight).sum())(outputs()).sum().backward()
    assert weight.grad is not None
    assert weight.grad.any()


def test_a_loss_that_writes_into_its_inputs_is_reported() -> None:
    outputs = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def doubled(y: Tensor, target: Tensor) -> Tensor:
        return (y.mul_(2) - target).square().mean()

    def into_target(y: Tensor, target: Tensor) -> Tensor:
        return (y - target.mul_(2)).square().mean()

    target = torch.ones(3, 4, dtype=torch.float64)
    for loss in (doubled, into_target):
        with pytest.raises(hf.FusionError, match=f"{loss.__name__} writes into its arguments"):
            hf.per_model(loss)(outputs * 1, target)
    targets = torch.ones(2, 3, 4, dtype=torch.float64)
    expected = torch.stack([into_target(y, t) for y, t in zip(outputs, targets.clone(), strict=True)])
    torch.testing.assert_close(hf.per_model(into_target)(outputs * 1, hf.stacked(targets)), expected)
    assert torch.equal(targets, torch.full_like(targets, 2.0))

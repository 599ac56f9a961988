"""Captures that are found again: only where nothing is different that forward can read."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfusion.capture.export import capture
from hfusion.core.program import Capture

SCALE = 2.0
FLOAT = torch.float32
SETTINGS: dict[str, Any] = {"power": 1}


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Helper:
    shift = 1.0

    def apply(self, x: Tensor) -> Tensor:
        return x + self.shift


class Reading(nn.Module):
    """Reads an attribute, variables of its file through a function and a method, a class and an object."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.0)
        self.slope = 0.1
        self.table = [0.0, 1.0, 2.0]
        self.helper = Helper()

    def power(self, x: Tensor) -> Tensor:
        return x ** SETTINGS["power"]

    def forward(self, x: Tensor) -> Tensor:
        h = scaled(self.power(self.linear(x))) * self.factor + torch.tensor(self.table)
        return nn.functional.leaky_relu(self.helper.apply(self.drop(h)), self.slope)


def found(module: nn.Module, *args: Any, **options: Any) -> Capture:
    return capture(module, args or (torch.ones(4, 3),), {}, **options)


FIRST = Reading()


def test_a_model_that_is_alike_has_the_same_graph() -> None:
    first = found(FIRST)
    assert found(Reading()).graph is first.graph
    assert found(FIRST).graph is first.graph


class Other(Reading):
    def power(self, x: Tensor) -> Tensor:
        return -super().power(x)


def _frozen(module: Reading) -> Reading:
    module.linear.weight.requires_grad_(False)
    return module


def _with(name: str, value: Any) -> Callable[[Reading], Reading]:
    def change(module: Reading) -> Reading:
        setattr(module, name, value)
        return module

    return change


def _hooked(module: Reading) -> Reading:
    module.drop.register_forward_hook(lambda part, args, output: output * 3)
    return module


def _shifted(module: Reading) -> Reading:
    module.helper.shift = 4.0
    return module


def _written(module: Reading) -> Reading:
    module.table[0] = 1.0
    return module


CHANGES: dict[str, Callable[[Reading], nn.Module]] = {
    "attribute": _with("slope", 0.2),
    "zero of another sign": _with("slope", -0.1),
    "dtype": lambda module: module.double(),
    "mode": lambda module: module.eval(),
    "frozen": _frozen,
    "table": _written,
    "object": _shifted,
    "hook": _hooked,
    "own method": _with("power", lambda x: x * 5),
    "class": lambda module: Other(),
    "width": _with("linear", nn.Linear(3, 3, bias=False)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_different_modules_are_captured_again(change: Callable[[Reading], nn.Module]) -> None:
    first = found(FIRST)
    module = change(Reading())
    x = torch.ones(4, 3, dtype=next(module.parameters()).dtype)
    assert found(module, x).graph is not first.graph


def test_variables_outside_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    first = found(FIRST)
    for target, name, value in [
        ("tests.capture.test_capture_cache", "SCALE", 3.0),
        ("tests.capture.test_capture_cache", "scaled", lambda x: x),
        ("tests.capture.test_capture_cache.Reading", "factor", 2.0),
        ("tests.capture.test_capture_cache.Helper", "shift", 3.0),
        ("tests.capture.test_capture_cache.Reading", "power", lambda self, x: x),
    ]:
        with monkeypatch.context() as changed:
            changed.setattr(f"{target}.{name}", value)
            assert found(Reading()).graph is not first.graph
    monkeypatch.setitem(SETTINGS, "power", 2)
    assert found(Reading()).graph is not first.graph


def test_different_calls_are_captured_again() -> None:
    first = found(FIRST)
    calls: list[Capture] = [
        found(FIRST, torch.ones(5, 3)),
        found(FIRST, torch.ones(4, 3, requires_grad=True)),
        found(FIRST, torch.ones(4, 3), varying=False),
        found(FIRST, torch.ones(4, 2, 3)),
        found(FIRST, torch.ones(4, 3), dims=[{1}]),
    ]
    assert len({id(entry.graph) for entry in [first, *calls]}) == 6


class Asking(nn.Module):
    """Takes tensors of any dtype, and asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight)) * x.element_size()


def test_inputs_of_another_dtype_are_captured_again() -> None:
    module = Asking()
    single, again, double = (found(module, torch.ones(4, 3, dtype=d)).graph for d in (FLOAT, FLOAT, torch.float64))
    assert again is single
    assert double is not single


class Drawing(nn.Module):
    """Reads what has no content to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.source = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * copy.deepcopy(self.source).random()


class Holding(nn.Module):
    """Holds a tensor that is freed together with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.held = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.held


@pytest.mark.parametrize("kind", [Drawing, Holding])
def test_modules_that_cannot_be_recognized_are_captured_each_time(kind: type[nn.Module]) -> None:
    module = kind()
    assert found(module).graph is not found(module).graph

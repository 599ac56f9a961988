"""Attributes of any kind in which members differ, or which forward changes: fused equals alone, or it is refused."""

from __future__ import annotations

import functools
import types
from collections import UserDict, UserList, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.alone import assert_alone, net, normal


class Row(list[Any]):
    scale: float


class Options(dict[str, Any]):
    scale: float


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Number(float):
    scale: float


class Scaling:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale

    def grown(self, x: Tensor) -> Tensor:
        self.scale += 1
        return x * self.scale


def with_scale(value: Any, scale: float) -> Any:
    value.scale = scale
    return value


def of_attribute(scale: float) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        return x * function.scale  # type: ignore[attr-defined, no-any-return]

    return with_scale(function, scale)  # type: ignore[no-any-return]


def of_default(scale: float) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor, factor: float = scale) -> Tensor:
        return x * factor

    return function


# How an attribute is made from a number, and how forward computes with it.
HELD: dict[str, tuple[Callable[[float], Any], Callable[[Any, Tensor], Tensor]]] = {
    "list with an attribute": (lambda v: with_scale(Row([1]), v), lambda held, x: x * held.scale),
    "dict with an attribute": (lambda v: with_scale(Options(a=1), v), lambda held, x: x * held.scale),
    "number with an attribute": (lambda v: with_scale(Number(1), v), lambda held, x: x * held.scale),
    "tensor with an attribute": (lambda v: with_scale(torch.ones(1), v), lambda held, x: x * held.scale),
    "slots": (Slotted, lambda held, x: x * held.scale),
    "deque": (lambda v: deque([v], 3), lambda held, x: x * held[0]),
    "length of a deque": (lambda v: deque([1.0], int(v)), lambda held, x: x * held.maxlen),
    "set": (lambda v: {v}, lambda held, x: x * sum(held)),
    "frozenset": (lambda v: frozenset([v]), lambda held, x: x * sum(held)),
    "list in a tuple": (lambda v: ([v],), lambda held, x: x * held[0][0]),
    "UserDict": (lambda v: UserDict(a=v), lambda held, x: x * held["a"]),
    "UserList": (lambda v: UserList([v]), lambda held, x: x * held[0]),
    "namespace": (lambda v: types.SimpleNamespace(a=types.SimpleNamespace(b=v)), lambda held, x: x * held.a.b),
    "attribute of a function": (of_attribute, lambda held, x: held(x)),
    "default of a function": (of_default, lambda held, x: held(x)),
    "closure": (lambda v: lambda x: x * v, lambda held, x: held(x)),
    "bound method": (lambda v: Scaling(v).__call__, lambda held, x: held(x)),
    "object that is called": (Scaling, lambda held, x: held(x)),
    "partial": (lambda v: functools.partial(torch.mul, torch.tensor(v).double()), lambda held, x: held(x)),
    "partial with a keyword": (lambda v: functools.partial(torch.add, alpha=v), lambda held, x: held(x, x)),
}


@pytest.mark.parametrize("kind", HELD)
def test_members_that_differ_in_an_attribute(kind: str) -> None:
    make, use = HELD[kind]

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return use(self.held, self.fc(x))  # type: ignore[operator]

    kinds = net(forward)
    for scales in ((1.5, 1.5), (1.5, 3.5)):
        models = [kinds() for _ in scales]
        for model, scale in zip(models, scales, strict=True):
            model.held = make(scale)
        x = normal(3, 4)
        torch.testing.assert_close(hf.fuse(models)(x), torch.stack([model(x) for model in models]))


@pytest.mark.parametrize("name", ["fc.weight", "buffer"])
@pytest.mark.parametrize("scales", [(1.5, 1.5), (1.5, 3.5)])
def test_attributes_of_registered_tensors(name: str, scales: tuple[float, float]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.fc(x) * self.buffer * dict(self.state_dict(keep_vars=True))[name].scale  # type: ignore[no-any-return]

    kinds = net(forward, lambda module: module.register_buffer("buffer", torch.ones(4).double()))
    models = [kinds() for _ in scales]
    for model, scale in zip(models, scales, strict=True):
        with_scale(dict(model.state_dict(keep_vars=True))[name], scale)
    x = normal(3, 4)
    expected = [model(x) for model in models]
    fused = hf.fuse(models)
    torch.testing.assert_close(fused(x), torch.stack(expected))
    for member, expected_output in zip(fused.unfuse(), expected, strict=True):
        torch.testing.assert_close(member(x), expected_output)


WEIGHT, LAYER = nn.Parameter(torch.ones(4).double()), nn.Linear(4, 4).double()


def with_parameter(self: Any, x: Tensor) -> Tensor:
    return self.fc(x) * WEIGHT  # type: ignore[no-any-return]


def with_layer(self: Any, x: Tensor) -> Tensor:
    return LAYER(self.fc(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("forward", "weight"), [(with_parameter, WEIGHT), (with_layer, LAYER.weight)])
def test_a_parameter_outside_of_the_models_gets_its_gradient(
    forward: Callable[..., Tensor], weight: nn.Parameter
) -> None:
    models, x = [net(forward)() for _ in range(2)], normal(3, 4)
    fused = hf.fuse(models)
    (gradient,) = torch.autograd.grad(fused(x).square().sum(), [weight])
    (expected,) = torch.autograd.grad(torch.stack([model(x) for model in models]).square().sum(), [weight])
    torch.testing.assert_close(gradient, expected)
    assert "that the model does not register" in str(fused.report())


def grown_default() -> Callable[[Tensor], Tensor]:
    def function(x: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006
        calls.append(1)
        return x * len(calls)

    return types.FunctionType(function.__code__, globals(), None, ([],))


def grown_attribute() -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        function.scale += 1  # type: ignore[attr-defined]
        return x * function.scale  # type: ignore[attr-defined, no-any-return]

    return with_scale(function, 0.0)  # type: ignore[no-any-return]


def grow(held: Any, x: Tensor) -> Tensor:
    held.scale += 1
    return x * held.scale  # type: ignore[no-any-return]


def appended(held: Any, x: Tensor) -> Tensor:
    held.append(1.0)
    return x * sum(held)


def added(held: Any, x: Tensor) -> Tensor:
    held.add(len(held))
    return x * len(held)


GROWN: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "attribute of a list": (lambda: with_scale(Row([1]), 0.0), grow),
    "attribute of a dict": (lambda: with_scale(Options(a=1), 0.0), grow),
    "slot": (lambda: Slotted(0.0), grow),
    "set": (set, added),
    "deque": (lambda: deque(maxlen=3), appended),
    "list in a tuple": (lambda: ([],), lambda held, x: appended(held[0], x)),
    "object in a set": (lambda: {Scaling(0.0)}, lambda held, x: next(iter(held)).grown(x)),
    "bound method": (lambda: Scaling(0.0).grown, lambda held, x: held(x)),
    "list of a partial": (lambda: functools.partial(appended, []), lambda held, x: held(x)),
    "keyword of a partial": (lambda: functools.partial(appended, held=[]), lambda held, x: held(x=x)),
    "attribute of a function": (grown_attribute, lambda held, x: held(x)),
    "default of a function": (grown_default, lambda held, x: held(x)),
}


@pytest.mark.parametrize("kind", GROWN)
def test_state_of_any_kind_that_later_calls_read_is_refused(kind: str) -> None:
    make, use = GROWN[kind]

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return use(self.held, self.fc(x))  # type: ignore[operator]

    models = [net(forward, lambda module: setattr(module, "held", make()))() for _ in range(2)]
    with pytest.raises(hf.FusionError, match=r"forward keeps values in the Python attribute held"):
        hf.fuse(models)(normal(3, 4))


def test_a_set_may_be_a_cache() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.seen.add(len(x))
        return self.fc(x) * 2  # type: ignore[no-any-return]

    models = [net(forward, lambda module: setattr(module, "seen", set()))() for _ in range(2)]
    assert_alone(models, normal(3, 4), normal(5, 4), normal(2, 4))

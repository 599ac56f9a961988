"""Registered tensors that a looped module holds a second time, in plain attributes, are the array's in the loop."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import hfusion as hf
from tests.alone import assert_alone, looped, normal

Gains = namedtuple("Gains", ["gain", "power"])


class Slotted:
    __slots__ = ("gain",)


class Holder:
    pass


class Base(nn.Module):
    """Multiplies by what ``gain`` reads; a branch on values keeps it out of a graph."""

    def __init__(self, prepare: Callable[[Any], None], gain: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.gain = gain
        self.fc, self.g = nn.Linear(4, 4).double(), nn.Parameter(normal(4))
        self.register_buffer("n", torch.zeros(4, dtype=torch.float64))
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(x.detach().mean(0))
        return self.fc(x if x.sum() < 1e9 else -x) * self.gain(self)


class Around(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.base, self.out = Base(*args), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.base(x))


def scheduled(self: Any) -> None:
    self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
    self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)


def in_object(kind: type) -> Callable[[Any], None]:
    def prepare(self: Any) -> None:
        self.held = kind()
        self.held.gain = self.g

    return prepare


def held(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def prepare(self: Any) -> None:
        vars(self)["held"] = make(self)

    return prepare


def traced(self: Any) -> None:
    # As torchvision's feature extractors, which keep graphs for both modes.
    self.held = fx.Tracer().trace(nn.Sequential(self.fc))


def plain(self: Any) -> Tensor:
    return self.g  # type: ignore[no-any-return]


HELD: dict[str, tuple[Callable[[Any], None], Callable[[Any], Tensor]]] = {
    "optimizer": (scheduled, plain),
    "optimizer that is read": (scheduled, lambda self: self.optimizer.param_groups[0]["params"][0]),
    "dict": (held(lambda self: {"g": self.g}), lambda self: self.held["g"]),
    "nested": (
        held(lambda self: {"a": [self.n, {"g": self.g}]}),
        lambda self: self.held["a"][1]["g"] + self.held["a"][0],
    ),
    "tuple": (held(lambda self: (self.g, 2)), lambda self: self.held[0]),
    "namedtuple": (held(lambda self: Gains(self.g, 2)), lambda self: self.held.gain**self.held.power),
    "list in a tuple": (held(lambda self: ([self.g],)), lambda self: self.held[0][0]),
    "set that is not read": (held(lambda self: {self.g}), plain),
    "partial": (held(lambda self: partial(torch.add, self.g)), lambda self: self.held(1)),
    "object": (in_object(Holder), lambda self: self.held.gain),
    "slots": (in_object(Slotted), lambda self: self.held.gain),
    "attribute": (held(lambda self: self.g), lambda self: self.held),
    "buffer": (held(lambda self: [self.n]), lambda self: self.held[0]),
    "graph": (traced, plain),
    # As torchrl's actors, which hold a part of their modules in a second container.
    "container": (held(lambda self: nn.Sequential(self.fc, nn.Tanh())), lambda self: self.held(self.g)),
}


@pytest.mark.parametrize("kind", [Base, Around])
@pytest.mark.parametrize("name", HELD)
def test_held_twice(name: str, kind: type[nn.Module]) -> None:
    fused = assert_alone([kind(*HELD[name]) for _ in range(2)], normal(3, 4), normal(3, 4))
    assert looped(fused.report().parts[0]) == {"forward" if kind is Base else "base"}


def with_default(self: Any) -> Any:
    def default(x: Tensor, gain: Tensor = self.g) -> Tensor:
        return x * gain

    return default


def over(tensor: Tensor) -> Any:
    return lambda x: x * tensor


@pytest.mark.parametrize("make", [with_default, lambda self: over(self.g), lambda self: over(self.n)])
def test_functions_that_hold_a_tensor(make: Callable[[Any], Any]) -> None:
    models = [Base(held(make), lambda self: self.held(1.0)) for _ in range(2)]
    with pytest.raises(hf.FusionError, match=r"held is a function that holds [gn] in a closure or a default"):
        hf.fuse(models)(normal(3, 4))


class Remade(nn.Module):
    """Copied by calling ``__init__``, as einops' layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x * 3

    def __setstate__(self, state: Any) -> None:
        self.__init__()  # type: ignore[misc]


class Shaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.shape = nn.Linear(4, 4).double(), nn.ModuleList([Remade()])

    def forward(self, x: Tensor) -> Tensor:
        return self.shape[0](self.fc(x if x.sum() < 1e9 else -x))


def test_copies_have_the_modes_of_the_original() -> None:
    models, x = [Shaped() for _ in range(2)], normal(3, 4)
    fused = hf.fuse(models)
    for training in (True, False, True):
        fused.train(training)
        expected = torch.stack([model.train(training)(x) for model in models])
        torch.testing.assert_close(fused(x), expected, rtol=1e-9, atol=1e-12)
    started = hf.fuse([model.eval() for model in models])
    torch.testing.assert_close(started(x), torch.stack([model(x) for model in models]), rtol=1e-9, atol=1e-12)
    assert not any(module.training for member in started for module in member.modules())

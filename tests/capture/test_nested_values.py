"""Numbers in nested containers and objects, in attributes and global variables: fused equals alone."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hfusion as hf
from tests.alone import net, normal


class Row(list[Any]):
    pass


class Options(dict[str, Any]):
    pass


class Slotted:
    __slots__ = ("held",)


class Config:
    pass


def attribute_of(value: Any) -> Callable[[Any], Any]:
    def holding(inner: Any) -> Any:
        holder = value()
        holder.held = inner
        return holder

    return holding


def function() -> Callable[[Tensor], Tensor]:
    return lambda x: x


# How a value holds another one, and the expression that reads it.
HOLDERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda inner: [0.0, inner], "[1]"),
    "dict": (lambda inner: {"a": 0.0, "held": inner}, "['held']"),
    "deque": (lambda inner: deque([inner]), "[0]"),
    "attribute of a list": (attribute_of(lambda: Row([0.0])), ".held"),
    "attribute of a dict": (attribute_of(lambda: Options(a=0.0)), ".held"),
    "object": (attribute_of(Config), ".held"),
    "slot": (attribute_of(Slotted), ".held"),
    "namespace": (attribute_of(types.SimpleNamespace), ".held"),
    "function": (attribute_of(function), ".held"),
    "tensor": (attribute_of(lambda: torch.ones(2)), ".held"),
}
OUTSIDE = {**HOLDERS, "module": (attribute_of(nn.Identity), ".held")}
PATHS = st.lists(st.sampled_from(sorted(HOLDERS)), min_size=1, max_size=3)
PATHS_OUTSIDE = st.lists(st.sampled_from(sorted(OUTSIDE)), min_size=1, max_size=3)


def nested(path: list[str], number: float) -> tuple[Any, str]:
    """Return a value that holds ``number`` behind the holders ``path``, and the expression that leads to it."""
    value: Any = number
    for kind in reversed(path):
        value = OUTSIDE[kind][0](value)
    return value, "".join(OUTSIDE[kind][1] for kind in path)


def functions(text: str, space: dict[str, Any]) -> dict[str, Any]:
    """Return a forward and a loss that read the expression ``text``, and a function that assigns it."""
    source = f"""
def forward(self, x):
    return self.fc(x) * {text}

def loss(y, target):
    return (y - target).square().mean() * {text}

def put(number):
    {text} = number
"""
    exec(compile(source, "<nested>", "exec"), space)
    return space


@given(path=PATHS, other=st.sampled_from([1.5, 2.5]))
@settings(deadline=None, max_examples=15)
def test_members_may_differ_in_a_nested_number(path: list[str], other: float) -> None:
    text = nested(path, 0.0)[1]
    kind = net(functions(f"self.config{text}", {"__name__": __name__})["forward"])
    models: list[Any] = [kind() for _ in range(2)]
    for model, number in zip(models, (1.5, other), strict=True):
        model.config = nested(path, number)[0]
    x = normal(3, 4)
    torch.testing.assert_close(hf.fuse(models)(x), torch.stack([model(x) for model in models]))


@given(path=PATHS_OUTSIDE)
@settings(deadline=None, max_examples=15)
def test_a_nested_number_outside_of_the_models_counts_at_each_call(path: list[str]) -> None:
    value, text = nested(path, 1.5)
    space = functions(f"CONFIG{text}", {"CONFIG": value, "__name__": __name__})
    models, x = [net(space["forward"])() for _ in range(2)], normal(3, 4)
    fused, plain, losses = hf.fuse(models), hf.fuse([nn.Linear(4, 4).double() for _ in range(2)]), space["loss"]
    for number in (1.5, 2.5, 1.5):
        space["put"](number)
        torch.testing.assert_close(fused(x), torch.stack([model(x) for model in models]))
        outputs = plain(x)
        expected = torch.stack([losses(output, x) for output in outputs])
        torch.testing.assert_close(hf.per_model(losses)(outputs, x), expected)

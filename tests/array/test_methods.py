"""Methods of the members other than forward, called of an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x)).tanh()

    def get_value(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self(x)) * scale

    def both(self, x: Tensor) -> dict[str, Tensor]:
        return {"features": self.forward(x), "value": self._again(x)}

    def _again(self, x: Tensor) -> Tensor:
        return self.get_value(x, scale=2.0)

    @torch.no_grad()
    def act(self, x: Tensor) -> Tensor:
        return self.forward(x).argmax(-1)

    def by_value(self, x: Tensor) -> Tensor:
        return self.get_value(x) if float(x.detach().sum()) > -1e9 else x


class Encoder(nn.Module):
    """Has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x)


def agents(training: bool = True) -> list[nn.Module]:
    return [Agent().double().train(training) for _ in range(3)]


def assert_as_alone(array: Any, members: list[Any], call: Callable[[Any], Any]) -> None:
    rows = [pytree.tree_leaves(call(member)) for member in members]
    for actual, expected in zip(pytree.tree_leaves(call(array)), zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(actual, torch.stack(expected), rtol=1e-9, atol=1e-12)


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "by attribute": lambda m, x: m.get_value(x),
    "keyword": lambda m, x: m.get_value(x, scale=3.0),
    "nested": lambda m, x: m.both(x),
    "without gradients": lambda m, x: m.act(x),
    "looped": lambda m, x: m.by_value(x),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_method_of_an_array_is_that_of_the_members(name: str, training: bool) -> None:
    members, x = agents(training), torch.randn(5, 4, dtype=torch.float64)
    array = hf.fuse(members)
    for k in range(2):
        assert_as_alone(array, members, lambda m, x=x + k: CALLS[name](m, x))
        assert_as_alone(array, members, lambda m, x=x + k: m(x))
    for key, stack in array.named_buffers():
        torch.testing.assert_close(stack, torch.stack([member.get_buffer(key) for member in members]))
    assert array.training is training


def test_gradients_through_a_method() -> None:
    members, x = agents(), torch.randn(3, 5, 4, dtype=torch.float64)
    array = hf.fuse(members)
    array.call("get_value", hf.stacked(x)).sin().sum().backward()
    for member, row in zip(members, x, strict=True):
        member.get_value(row).sin().sum().backward()
    for key, stack in array.named_parameters():
        torch.testing.assert_close(stack.grad, torch.stack([member.get_parameter(key).grad for member in members]))


def test_unknown_and_unsupported_methods_raise() -> None:
    array = hf.fuse(agents())
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        array.nothing  # noqa: B018
    with pytest.raises(hf.FusionError, match=r"Agent has no method to of its own that computes; it has _again, act"):
        array.call("to", torch.ones(2, 4))


def test_a_class_without_forward() -> None:
    members, x = [Encoder() for _ in range(2)], torch.ones(2, 4)
    array = hf.fuse(members)
    with pytest.raises(hf.FusionError, match=r"Encoder defines no forward.*fused\.method"):
        array(x)
    assert_as_alone(array, members, lambda m: m.encode(x))

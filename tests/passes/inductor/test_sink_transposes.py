"""Graphs with transpositions sunk against the graphs themselves: one result, bit for bit, in the same memory order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hfusion.passes.inductor.sink_transposes import sink_transposes


def traced(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    module: fx.GraphModule = make_fx(function, tracing_mode="fake")(*args)
    return module


def order(module: fx.GraphModule) -> list[str]:
    return [node.target._opname for node in module.graph.nodes if node.op == "call_function"]


def mixed(x: Tensor, y: Tensor) -> Tensor:
    """Operands of which only one is transposed."""
    return x.mT + y.mT.contiguous()


def other_dims(x: Tensor, y: Tensor) -> Tensor:
    return (x.mT.transpose(0, 1) * 2).transpose(0, 1).cos()


def expanded(x: Tensor, y: Tensor) -> Tensor:
    """Bases whose memory order is not that of their dims."""
    return (x[:1].expand(2, 3, 4).mT.exp() + y.mT).mT.reshape(-1)


def viewed(x: Tensor, y: Tensor) -> Tensor:
    """A copy in the order of the dims, without which there were no such view."""
    return (x.mT + y.mT).sin().clone(memory_format=torch.contiguous_format).view(2, 12)


def written(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Writes through a view that is sunk, before and after its use."""
    t = x.mT.sin()
    u = t.cos()
    t.add_(1)
    u[0].mul_(y.mT[0])
    return t.mul(2), u.mT


def selected(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x.mT > 0, x.mT, y.mT).clamp(min=-0.5)


CASES = [mixed, other_dims, expanded, viewed, written, selected]


@pytest.mark.parametrize("strides", ["dense", "transposed"])
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_same_values_and_strides(function: Callable[..., Any], strides: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 2, 3, 4)
    if strides == "transposed":
        x = torch.randn(2, 4, 3).mT
    before = traced(function, x, y)
    after = sink_transposes(before)
    results = [module(x.clone(), y.clone()) for module in (before, after)]
    for expected, actual in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()


def test_pointwise_operators_come_before_the_transposition() -> None:
    graph = traced(lambda x: (x.mT.sin() * 2).detach().cos(), torch.randn(2, 3, 4))
    assert order(graph)[0] == "transpose"
    assert order(sink_transposes(graph)) == ["sin", "mul", "cos", "transpose"]


def test_transpositions_cancel() -> None:
    graph = traced(lambda x: x.mT.sin().transpose(1, 2).exp(), torch.randn(2, 3, 4))
    assert order(sink_transposes(graph)) == ["sin", "exp"]


def test_an_operator_that_chooses_its_memory_order_stays() -> None:
    graph = traced(lambda x: x.mT.clone(memory_format=torch.contiguous_format), torch.randn(2, 3, 4))
    assert order(sink_transposes(graph)) == ["transpose", "clone"]


def test_the_input_is_left_as_it_was() -> None:
    graph = traced(lambda x: x.mT.sin(), torch.randn(2, 3, 4))
    before = graph.code
    sink_transposes(graph)
    assert graph.code == before

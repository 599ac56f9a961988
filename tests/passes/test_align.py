"""Graphs of members that differ in scalars become one graph; all other differences are reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from hfusion.core.errors import FusionError
from hfusion.ops.rule import MemberScalars
from hfusion.passes.align import align, plain

aten = torch.ops.aten


def graph(target: Any, *rest: Any, swap: bool = False, more: bool = False, **kwargs: Any) -> fx.Graph:
    built = fx.Graph()
    x, y = built.placeholder("x"), built.placeholder("y")
    node = built.call_function(target, (*((y, x) if swap else (x, y)), *rest), kwargs)
    if more:
        node = built.call_function(aten.relu.default, (node,))
    built.output((node,))
    return built


def test_scalars_that_differ_become_one_per_member() -> None:
    merged = align([graph(aten.add.Tensor, alpha=1), graph(aten.add.Tensor, alpha=2)], [0, 1, 0])
    (node,) = [n for n in merged.nodes if n.op == "call_function"]
    _, named = node.meta["arguments"]
    assert named["alpha"] == MemberScalars((1, 2, 1))
    assert [named[name].name for name in ("self", "other")] == ["x", "y"]


def test_a_default_that_one_graph_leaves_out_counts() -> None:
    merged = align([graph(aten.add.Tensor), graph(aten.add.Tensor, alpha=2)], [0, 1])
    (node,) = [n for n in merged.nodes if n.op == "call_function"]
    assert node.meta["arguments"][1]["alpha"] == MemberScalars((1, 2))


@pytest.mark.parametrize("values", [(1, 1.0), (1, True), (0.0, -0.0)], ids=str)
def test_numbers_that_only_compare_equal_stay_each_members_own(values: tuple[Any, ...]) -> None:
    assert plain(MemberScalars(values)) == MemberScalars(values)
    assert repr(plain(MemberScalars((values[1], values[1])))) == repr(values[1])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: graph(aten.sub.Tensor), "aten.add.Tensor in model 0 and aten.sub.Tensor in model 1"),
        (lambda: graph(aten.add.Tensor, swap=True), "different operands"),
        (lambda: graph(aten.add.Tensor, more=True), r"different numbers of nodes \(model 0: 4, model 1: 5\)"),
    ],
)
def test_differences_are_reported(other: Callable[[], fx.Graph], message: str) -> None:
    with pytest.raises(FusionError, match=message):
        align([graph(aten.add.Tensor), other()], [0, 1])

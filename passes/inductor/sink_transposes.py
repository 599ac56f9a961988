"""Pointwise operators in the memory order of their operands, for a compiler that computes in the order of the dims.

Eager torch keeps the order of memory: of a transposed operand ``relu`` gives a transposed result, so that feature-major
values stay so through a network at no cost. Inductor writes the result in the order of its dims, a copy at every
operator. Here ``op(transpose(x))`` becomes ``transpose(op(x))``, and transpositions that meet cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.member_random import draws_random
from hfusion.ops.shape import equal
from hfusion.passes.views import IDENTITY
from hfusion.torch_private.fake_tensors import FakeTensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Transposed:
    """A value that is ``base`` with the two ``dims`` swapped."""

    base: fx.Node
    dims: tuple[int, int]


def sink_transposes(module: fx.GraphModule) -> fx.GraphModule:
    """Sink transpositions below pointwise operators of ``module``, an ATen graph with fake tensors in ``meta["val"]``.

    Values stay the same, bit for bit, and so do strides, for which the rest of the graph was traced.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    views: dict[fx.Node, Transposed] = {}

    def value(node: fx.Node) -> fx.Node:
        if node not in env:
            env[node] = graph.call_function(aten.transpose.int, (views[node].base, *views[node].dims))
            env[node].meta.update(node.meta)
        return env[node]

    def keep(node: fx.Node, base: fx.Node, dims: tuple[int, int]) -> None:
        views[node] = Transposed(base, dims)

    for node in module.graph.nodes:
        sources = node.all_input_nodes
        if node.target is aten.transpose.int:
            (source,), dims = sources, _dims(node)
            if source in views and views[source].dims == dims:
                env[node] = views[source].base
            else:
                keep(node, value(source), dims)
        elif node.target in IDENTITY and sources[0] in views:
            keep(node, views[sources[0]].base, views[sources[0]].dims)
        elif _pointwise(node) and _alike(sources, views) and (sunk_val := _sunk(node, views)) is not None:
            base = graph.node_copy(node, lambda n: views[n].base)
            base.meta = {"val": sunk_val}
            keep(node, base, views[sources[0]].dims)
        else:
            env[node] = graph.node_copy(node, value)
    graph.lint()
    return fx.GraphModule(module, graph)


def _dims(node: fx.Node) -> tuple[int, int]:
    rank = node.meta["val"].dim()
    first, second = sorted(int(dim) % rank for dim in node.args[1:])  # type: ignore[arg-type]
    return first, second


def _pointwise(node: fx.Node) -> bool:
    """True if ``node`` is a pointwise operator that draws no random numbers and writes into no operand."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags or target._schema.is_mutable:
        return False
    return not draws_random(target) and isinstance(node.meta.get("val"), Tensor)


def _alike(sources: list[fx.Node], views: dict[fx.Node, Transposed]) -> bool:
    """True if all operands are tensors of one rank with the same transposition."""
    if not sources or not all(source in views for source in sources):
        return False
    return len({(views[source].dims, source.meta["val"].dim()) for source in sources}) == 1


def _sunk(node: fx.Node, views: dict[fx.Node, Transposed]) -> FakeTensor | None:
    """Return the result of ``node`` on the bases of its operands, None if its transposition has other strides.

    Strides differ for operators that choose a memory order, such as `aten.clone`.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: views[n].base.meta["val"])
    val: FakeTensor = node.meta["val"]
    with val.fake_mode:
        sunk: FakeTensor = node.target(*args, **kwargs)  # type: ignore[operator]
        strides = sunk.transpose(*views[node.all_input_nodes[0]].dims).stride()
    same_strides = all(equal(a, b) for a, b in zip(strides, val.stride(), strict=True))
    return sunk if same_strides else None

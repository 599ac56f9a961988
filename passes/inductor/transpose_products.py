"""Products that are read transposed, computed as the product of the transposed operands.

The gradient of a weight that a product read transposed is ``(x^T y)^T`` in autograd. It is then copied, or read by
pointwise operators, in the memory order of the weight. ``y^T x`` has that order already, and its long side where
kernels want it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

aten = torch.ops.aten

_PRODUCTS = frozenset({aten.bmm.default, aten.mm.default})


def transpose_products(module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite ``module``, an ATen graph with fake tensors in ``meta["val"]``; values stay the same up to rounding."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def transposed(node: fx.Node) -> fx.Node:
        if _transposes(node):
            return env[node.all_input_nodes[0]]
        transpose = graph.call_function(aten.transpose.int, (env[node], -2, -1))
        transpose.meta["val"] = node.meta["val"].mT
        return transpose

    for node in module.graph.nodes:
        product = _product(node)
        if product is None:
            env[node] = graph.node_copy(node, env.__getitem__)
        else:
            first, second = (factor for factor in product.args if isinstance(factor, fx.Node))
            target: Any = product.target
            env[node] = graph.call_function(target, (transposed(second), transposed(first)))
            env[node].meta["val"] = _in_order(_val(node))
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(module, graph)


def _product(node: fx.Node) -> fx.Node | None:
    """Return the product whose transposition ``node`` reads in the order of the dims, None if it has other users."""
    view = node
    if node.target is aten.clone.default and _val(node).is_contiguous():
        (view,) = node.all_input_nodes
        if len(view.users) > 1:
            return None
    elif not all(map(_reads_in_order, node.users)):
        return None
    if not _transposes(view):
        return None
    (product,) = view.all_input_nodes
    return product if product.target in _PRODUCTS and len(product.users) == 1 else None


def _reads_in_order(node: fx.Node) -> bool:
    target: Any = node.target
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return pointwise and isinstance(node.meta.get("val"), Tensor) and _val(node).is_contiguous()


def _transposes(node: fx.Node) -> bool:
    """True if ``node`` swaps the last two dims of one matrix or a stack of matrices."""
    if node.target is aten.t.default:
        return _val(node).dim() == 2
    if node.target is not aten.transpose.int:
        return False
    rank = _val(node).dim()
    return {int(dim) % rank for dim in node.args[1:]} == {rank - 2, rank - 1}  # type: ignore[arg-type]


def _in_order(val: Tensor) -> Tensor:
    fake: Any = val
    with fake.fake_mode:
        return val.clone(memory_format=torch.contiguous_format)


def _val(node: fx.Node) -> Tensor:
    val: Tensor = node.meta["val"]
    return val

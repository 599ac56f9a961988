"""Scattering one element per row into zeros, as the gradient of `max` does, written as a comparison.

A compiler of whole graphs fills the zeros, scatters, and reads them back in another order. A comparison of positions
is computed where the result is used, and nothing is stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from hfusion.ops.shape import equal

aten = torch.ops.aten

_ZEROS = frozenset({aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default})


def onehot(module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite ``module``, an ATen graph with fake tensors in ``meta["val"]``; values stay the same, bit for bit."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if _one_per_row(node):
            _, dim, index, source = node.args
            env[node] = graph.call_function(chosen, (env[index], env[source], node.meta["val"].shape[dim], dim))
            env[node].meta.update(node.meta)
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.lint()
    return fx.GraphModule(module, graph)


def chosen(index: Tensor, source: Tensor, size: int, dim: int) -> Tensor:
    """Scatter ``source`` at ``index`` into zeros of ``size`` along ``dim``, where both have size 1."""
    places = torch.arange(size, device=index.device)
    return torch.where(index == places.view(-1, *(1,) * (index.dim() - 1 - dim)), source, 0)


def _one_per_row(node: fx.Node) -> bool:
    """True if ``node`` scatters one element into every row of a tensor of zeros."""
    if node.target is not aten.scatter.src:
        return False
    base, dim, index, source = node.args
    if not isinstance(base, fx.Node) or base.target not in _ZEROS or not isinstance(dim, int) or dim < 0:
        return False
    sizes = list(node.meta["val"].shape)
    if not isinstance(sizes[dim], int):
        return False
    sizes[dim] = 1
    return _has_sizes(index, sizes) and _has_sizes(source, sizes)


def _has_sizes(node: Any, sizes: list[Any]) -> bool:
    shape = node.meta["val"].shape
    return len(shape) == len(sizes) and all(equal(a, b) for a, b in zip(shape, sizes, strict=True))

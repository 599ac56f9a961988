"""Operators that put values into a tensor of which these values are a view.

Inductor lets them write into that tensor where it is not used later, and reads the values while it writes: seen with
``index_put`` of torch 2.13, of which ``index_add`` is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from hfusion.torch_private.graph_passes import CustomGraphPass, get_hash_for_files, passes_already_set

_aten = torch.ops.aten
# Each takes the tensor first.
_PUT_INTO = frozenset(
    {
        _aten.index_put.default,
        _aten._unsafe_index_put.default,
        _aten.slice_scatter.default,
        _aten.select_scatter.default,
        _aten.diagonal_scatter.default,
        _aten.as_strided_scatter.default,
    }
)


class CopiesOfOverlaps(CustomGraphPass):
    """Lets these operators put their values into a copy, after the passes that are set already."""

    def __init__(self) -> None:
        self._before = passes_already_set()

    def __call__(self, graph: fx.Graph) -> None:
        for before in self._before:
            before(graph)
        for node in list(graph.nodes):
            if node.target in _PUT_INTO and _overlaps(node):
                with graph.inserting_before(node):
                    copy = graph.call_function(_aten.clone.default, (node.args[0],))
                copy.meta["val"] = node.args[0].meta["val"].clone()
                node.args = (copy, *node.args[1:])

    def uuid(self) -> Any:
        names = [each.uuid() for each in self._before]
        # None: torch keeps no program.
        return None if None in names else (get_hash_for_files((__file__,)), *names)


def _overlaps(node: fx.Node) -> bool:
    """Return whether a written operand overlaps another one in memory."""
    target = _memory(node.args[0])
    others: list[Any] = []
    fx.node.map_arg((node.args[1:], node.kwargs), others.append)
    return target is not None and any(_memory(other) == target for other in others)


def _memory(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None

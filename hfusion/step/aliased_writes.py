"""A pass for Inductor that copies a tensor before values are scattered into it that are views of the same tensor.

If the tensor is not used later, Inductor scatters in place and overwrites values that it has yet to read. This was
seen with ``index_put`` of torch 2.13, into which ``index_add`` decomposes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from hfusion.torch_private.graph_passes import CustomGraphPass, get_hash_for_files, passes_already_set

_aten = torch.ops.aten
# Operators whose first argument is the tensor that they put values into.
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
    """Runs the passes that are already set, then makes scatters with overlapping operands write into a copy."""

    def __init__(self) -> None:
        self._earlier_passes = passes_already_set()

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in self._earlier_passes:
            graph_pass(graph)
        for node in list(graph.nodes):
            if node.target in _PUT_INTO and _overlaps(node):
                with graph.inserting_before(node):
                    copy = graph.call_function(_aten.clone.default, (node.args[0],))
                copy.meta["val"] = node.args[0].meta["val"].clone()
                node.args = (copy, *node.args[1:])

    def uuid(self) -> Any:
        names = [graph_pass.uuid() for graph_pass in self._earlier_passes]
        # With None, torch caches no program.
        return None if None in names else (get_hash_for_files((__file__,)), *names)


def _overlaps(node: fx.Node) -> bool:
    """Return whether the tensor that an operator writes into shares its storage with another operand."""
    target = _memory(node.args[0])
    others: list[Any] = []
    fx.node.map_arg((node.args[1:], node.kwargs), others.append)
    return target is not None and any(_memory(other) == target for other in others)


def _memory(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None

"""Detect graphs with in-place operators whose results depend on the strides of inputs.

`reshape`, `flatten` and their like give a view where strides allow it, and a copy elsewhere. A write to one side
of such an operator reaches the other side only through a view.
"""

from __future__ import annotations

import torch
from torch import fx

from hfusion.passes.views import viewed, writes

aten = torch.ops.aten

VIEW_OR_COPY = frozenset(
    {
        aten.reshape.default,
        aten.reshape_as.default,
        aten.flatten.using_ints,
        aten.ravel.default,
        aten.contiguous.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
    }
)


def depends_on_strides(graph: fx.Graph, was_contiguous: bool) -> bool:
    """Return whether strides of inputs decide if a write reaches a value that is read later.

    ``was_contiguous``: some operator that may copy gave its operand, so that the graph does not show it.
    """
    nodes = list(graph.nodes)
    written = [node for node in nodes if writes(node)]
    if written and was_contiguous:
        return True
    conditional = [node for node in nodes if node.target in VIEW_OR_COPY]
    if not written or not conditional:
        return False
    position = {node: k for k, node in enumerate(nodes)}
    neighbors: dict[fx.Node, set[fx.Node]] = {node: set() for node in nodes}
    for node in nodes:
        source = node.args[0] if node.target in VIEW_OR_COPY or writes(node) else viewed(node)
        if isinstance(source, fx.Node):
            neighbors[node].add(source)
            neighbors[source].add(node)
    return any(
        position[node] < position[write] and _separates(node, write, neighbors, position)
        for write in written
        for node in conditional
    )


def _separates(
    node: fx.Node, write: fx.Node, neighbors: dict[fx.Node, set[fx.Node]], position: dict[fx.Node, int]
) -> bool:
    """True if ``write`` changes a value that is read later on the other side of ``node``, provided that is a view."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    result_side = _reachable(node, source, neighbors)
    source_side = _reachable(source, node, neighbors)
    if write in result_side:
        # The caller sees a write into a placeholder.
        other = source_side
        if any(side_node.op == "placeholder" for side_node in other):
            return True
    elif write in source_side:
        other = result_side
    else:
        return False
    return any(position[user] > position[write] for value in other for user in value.users)


def _reachable(start: fx.Node, without: fx.Node, neighbors: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """The nodes that share memory with ``start`` along edges other than the one to ``without``."""
    reached, waiting = {start}, [node for node in neighbors[start] if node is not without]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += neighbors[node]
    return reached

"""Programs as a compiler of whole graphs wants them: loops inside of a lowering written as one call."""

from __future__ import annotations

import torch
from torch import fx

from hfusion.core.layout import stacked_to_listed
from hfusion.ops.norm import BATCHED


def batch_member_loops(module: fx.GraphModule) -> fx.GraphModule:
    """``module``, a program's, with its loops in BATCHED replaced; the same values up to rounding."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.target in BATCHED:
            env[node] = graph.call_function(BATCHED[node.target], fx.map_arg(node.args, lambda n: env[_stacked(n)]))
            env[node].meta.update(node.meta)
        elif node.target is not stacked_to_listed or not all(user.target in BATCHED for user in node.users):
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)


def _stacked(node: fx.Node) -> fx.Node:
    """The stacked value that ``node`` is a list of, or itself."""
    source = node.args[0] if node.target is stacked_to_listed else node
    assert isinstance(source, fx.Node)
    return source

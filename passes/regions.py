"""Gather neighbouring loops over members into one loop, so that a member's values stay in the cache.

A region is a set of calls that all run member by member and need nothing computed from one another outside the set. It
becomes one module that runs the whole set for member 0, then for member 1, and so on.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx, nn
from torch._ops import OpOverload

from hfusion.core.layout import Layout, Listed
from hfusion.core.member_random import draws_random
from hfusion.ops.lowering import View
from hfusion.ops.rule import Memberwise, call_per_member
from hfusion.passes.candidates import pick
from hfusion.passes.side_effects import has_effect


class Region(nn.Module):
    """Runs ``body`` once per member; ``listed`` tells which inputs hold one entry per member."""

    def __init__(self, body: fx.GraphModule, listed: tuple[bool, ...], members: int) -> None:
        super().__init__()
        self.body = body
        self.listed = listed
        self.members = members

    def forward(self, *inputs: Any) -> tuple[Listed, ...]:
        run, marked = self.body.forward, list(zip(inputs, self.listed, strict=True))
        rows = [run(*[x[member] if listed else x for x, listed in marked]) for member in range(self.members)]
        return tuple(Listed(row) for row in zip(*rows, strict=True))


def regions(module: fx.GraphModule, members: int) -> fx.GraphModule:
    """``module`` with its loops over members gathered; the same values, bit for bit.

    A program with autocast borders, or whose random draws would change their order, stays as it is.
    """
    nodes = list(module.graph.nodes)
    depths = _depths(nodes)
    order = sorted(nodes, key=lambda n: (n.op == "output", depths[n], not _memberwise(n)))
    borders = any(n.op == "call_function" and not isinstance(n.target, OpOverload) and has_effect(n) for n in nodes)
    drawing, drawing_then = (
        [n for n in sequence if draws_random(n.meta.get("origin", n).target)] for sequence in (nodes, order)
    )
    if borders or drawing != drawing_then:
        return module
    root, graph = nn.Module(), fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    # Loops that are equally deep take nothing from one another.
    keys = {n: (depths[n], True) if _memberwise(n) else (0, False) for n in nodes}
    for loops, run in itertools.groupby(order, key=keys.__getitem__):
        group = list(run)
        if loops[1] and len(group) > 1:
            env |= _gather(root, graph, env, group, members)
        else:
            for node in group:
                env[node] = graph.node_copy(node, env.__getitem__)
    graph.lint()
    return fx.GraphModule(root, graph)


def _depths(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return for each node how often a path to it enters a loop, at most; loops of one depth can run as one."""
    depths: dict[fx.Node, int] = {}
    last: dict[fx.Node, fx.Node] = {}
    written = {root for node in nodes if _effect(node) for root in _roots(node)}
    for node in nodes:
        before = list(node.all_input_nodes)
        # Reads and writes of a tensor that is written anywhere keep their order.
        for buffer in _roots(node) & written:
            before += [last[buffer]] if buffer in last else []
            last[buffer] = node
        loop = _memberwise(node)
        depths[node] = max((depths[b] + (loop and not _memberwise(b)) for b in before), default=0)
    return depths


def _roots(node: fx.Node) -> set[fx.Node]:
    """The inputs of the program that a call takes as they are, or as views."""
    roots = set()
    for source in node.all_input_nodes:
        while _may_view(source):
            source = source.all_input_nodes[0]
        if source.op == "placeholder":
            roots.add(source)
    return roots


def _may_view(node: fx.Node) -> bool:
    """True if a value may be a view of its first operand."""
    # A shard takes as an input what an earlier one computed.
    lowering = node.meta.get("lowering") if node.all_input_nodes else None
    return lowering is not None and lowering.view is not View.NEVER and not _effect(node)


def _effect(node: fx.Node) -> bool:
    origin = node.meta.get("origin")
    return origin is not None and not node.meta.get("transition") and has_effect(origin)


def _memberwise(node: fx.Node) -> bool:
    return node.target is call_per_member or node.target is pick or isinstance(node.target, Memberwise)


def _gather(
    root: nn.Module, graph: fx.Graph, env: dict[fx.Node, fx.Node], group: list[fx.Node], members: int
) -> dict[fx.Node, fx.Node]:
    """Write ``group`` as one region; returns the new nodes for its values that are used outside."""
    inside = set(group)
    outside = list(dict.fromkeys(i for n in group for i in n.all_input_nodes if i not in inside))
    results = [n for n in group if any(user not in inside for user in n.users)]
    body = fx.Graph()
    member_env = {node: body.placeholder(f"{node.name}_row") for node in outside}
    for node in group:
        fn: Any = operator.getitem
        if node.target is pick:
            operands: Any = node.args, {}
        elif node.target is call_per_member:
            fn, _, *operands = node.args
        else:
            assert isinstance(node.target, Memberwise)
            fn, (_, *operands) = node.target.member, node.args
        member_env[node] = body.call_function(fn, *fx.map_arg(tuple(operands), member_env.__getitem__))
    body.output(tuple(member_env[node] for node in results))
    listed = tuple(node.meta.get("layout") is Layout.LISTED for node in outside)
    name = f"region_{len(list(root.children()))}"
    root.add_module(name, Region(fx.GraphModule(nn.Module(), body), listed, members))
    call = graph.call_module(name, tuple(env[node] for node in outside))
    new_nodes = {}
    for index, node in enumerate(results):
        new_nodes[node] = graph.call_function(operator.getitem, (call, index))
        new_nodes[node].meta.update(node.meta)
    return new_nodes

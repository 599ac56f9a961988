"""Lay the graphs of members with different scalars over one another, node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

from hfusion.core.errors import FusionError
from hfusion.core.layout import same_value
from hfusion.core.tree import contains, leaves
from hfusion.ops.rule import MemberScalars
from hfusion.passes.candidates import by_name


def align(graphs: Sequence[fx.Graph], variants: Sequence[int]) -> fx.Graph:
    """Return one graph for all members; ``variants[b]`` is the index of member b's graph in ``graphs``.

    Where the graphs' scalars differ, ``node.meta["arguments"]`` holds ``(args, kwargs)`` with `MemberScalars` entries.

    Raises:
        FusionError: the graphs differ in more than scalars.
    """
    result = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    rows = [list(graph.nodes) for graph in graphs]
    first_of = {variant: variants.index(variant) for variant in set(variants)}
    places = [{node: k for k, node in enumerate(row)} for row in rows]
    if len({len(row) for row in rows}) > 1:
        counts = ", ".join(f"model {first_of[v]}: {len(row)}" for v, row in enumerate(rows))
        raise FusionError(f"the models' graphs have different numbers of nodes ({counts})")
    for k, nodes in enumerate(zip(*rows, strict=True)):
        new = result.node_copy(nodes[0], lambda n: env[n])
        env[nodes[0]] = new
        if len(nodes) > 1:
            _merge(new, nodes, env, places, variants, k)
    return result


def _merge(
    new: fx.Node,
    nodes: Sequence[fx.Node],
    env: dict[fx.Node, fx.Node],
    places: Sequence[dict[fx.Node, int]],
    variants: Sequence[int],
    position: int,
) -> None:
    """Compare one node of every graph; note the scalars that differ."""
    model = variants.index
    for v, node in enumerate(nodes):
        if (node.op, node.target) != (nodes[0].op, nodes[0].target):
            raise FusionError(
                f"step {position} is {nodes[0].target} in model {model(0)} and {node.target} in model {model(v)}"
            )

    def merge(items: Sequence[Any]) -> Any:
        head = items[0]
        if isinstance(head, fx.Node):
            if any(not isinstance(i, fx.Node) or places[v][i] != places[0][head] for v, i in enumerate(items)):
                raise FusionError(f"step {position}, {nodes[0].target}, has different operands in different models")
            return env[head]
        if isinstance(head, list | tuple):
            if any(type(i) is not type(head) or len(i) != len(head) for i in items):
                raise FusionError(f"step {position}, {nodes[0].target}, has {items} as arguments in the models")
            merged = [merge(parts) for parts in zip(*items, strict=True)]
            return merged if isinstance(head, list) else tuple(merged)
        if isinstance(head, dict):
            return {name: merge([i[name] for i in items]) for name in head}
        if any(contains(item, fx.Node) for item in items):
            raise FusionError(f"step {position}, {nodes[0].target}, has a tensor in some models, and {head} in others")
        if all(same_value(item, head) for item in items):
            return head
        return MemberScalars(tuple(items[v] for v in variants))

    if isinstance(nodes[0].target, OpOverload):
        # By name, with defaults: a graph leaves out an argument that has its default value in one member only.
        named = merge([by_name(nodes[0].target, node.args, node.kwargs) for node in nodes])
        new.meta["arguments"] = ((), named)
    elif nodes[0].op != "placeholder":
        new.meta["arguments"] = tuple(merge([getattr(node, part) for node in nodes]) for part in ("args", "kwargs"))


def select(graph: fx.Graph, member: int) -> fx.Graph:
    """Return the graph of one member: an aligned graph with the member's own scalars."""
    result = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = env[node] = result.node_copy(node, env.__getitem__)
        if "arguments" in node.meta:
            new.args, new.kwargs = map_aggregate(node.meta["arguments"], lambda item: of_member(item, member, env))
            del new.meta["arguments"]
            new.meta.pop("members", None)
    return result


def select_rows(graph: fx.Graph, rows: Sequence[int]) -> fx.Graph:
    """The graph of an array whose member b has the scalars of member ``rows[b]``; a copy.

    ``node.meta["members"]`` is as ``arguments`` there, but also where the scalars of all ``rows`` are the same.
    """
    result = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            items = [_rows(item, rows, env) for item in results_of(node)]
            new = result.output(tuple(map(of_first, items)))
            new.meta["members"] = ((tuple(items),), {})
            new.meta["arguments"] = map_aggregate(new.meta["members"], plain)
            continue
        new = env[node] = result.node_copy(node, env.__getitem__)
        if "arguments" in node.meta:
            every = node.meta.get("members", node.meta["arguments"])
            new.meta["members"] = map_aggregate(every, partial(_rows, rows=rows, env=env))
            new.meta["arguments"] = map_aggregate(new.meta["members"], plain)
    return result


def results_of(output: fx.Node) -> Sequence[Any]:
    """Return the results in an output node: nodes, and values that are no tensors, `MemberScalars` if they differ."""
    args, _ = output.meta.get("members", output.meta.get("arguments", (output.args, {})))
    results: Sequence[Any] = args[0]
    return results


def of_first(item: Any) -> Any:
    """Return the first member's scalar of `MemberScalars`, and other values as they are."""
    return item.values[0] if isinstance(item, MemberScalars) else item


def _rows(item: Any, rows: Sequence[int], env: dict[fx.Node, fx.Node]) -> Any:
    if isinstance(item, MemberScalars):
        return MemberScalars(tuple(item.values[row] for row in rows))
    return env[item] if isinstance(item, fx.Node) else item


def plain(item: Any) -> Any:
    """One scalar where those of all members are the same."""
    if not isinstance(item, MemberScalars):
        return item
    first = item.values[0]
    return first if all(same_value(value, first) for value in item.values) else item


def scalars(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Return the members' values of all scalars that differ in an aligned graph."""
    nests = [node.meta.get("members", node.meta.get("arguments")) for node in graph.nodes]
    return [scalar.values for nest in nests for scalar in leaves(nest, MemberScalars)]


def of_member(item: Any, member: int, env: Mapping[fx.Node, fx.Node]) -> Any:
    """Return one member's scalar of `MemberScalars`, the node in ``env`` for a node, and other values as they are."""
    if isinstance(item, MemberScalars):
        return item.values[member]
    return env[item] if isinstance(item, fx.Node) else item

"""Lay the graphs of members with different scalars over one another, node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, fx
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


# Put the numbers of further members into a graph that one of them was captured as.

Path: TypeAlias = tuple[Any, ...]
Changes: TypeAlias = Mapping[int, Mapping[Path, tuple[Any, Any]]]
"""By call and path: the number in the graph, and the one to replace it. A tensor of numbers counts as one."""


class Unexplained(FusionError):
    """A number of a member that cannot be located in the graph."""


def fill(graph: fx.Graph, changes: Changes) -> tuple[fx.Graph, dict[str, tuple[Tensor, Tensor]]]:
    """Return the graph of a member whose numbers differ by ``changes`` from those of the member in ``graph``.

    Also returns the constants that change, by the names of placeholders: their old and new values.

    Raises:
        Unexplained: a number is at another place in the graph, or has another value.
    """
    filled, constants = fill_rows(graph, [0], {0: changes})
    return select(filled, 0), {name: pairs[0] for name, pairs in constants.items()}


def fill_rows(
    graph: fx.Graph, rows: Sequence[int], changes: Mapping[int, Changes]
) -> tuple[fx.Graph, dict[str, dict[int, tuple[Tensor, Tensor]]]]:
    """Return the graph of an array of members of ``graph``, and of members that differ from them by numbers; a copy.

    ``node.meta["members"]`` is as ``arguments`` there, but also where the scalars of all ``rows`` are the same.

    Args:
        rows: for each member to be, the member of ``graph`` that it is, or differs from by its ``changes``.
        changes: by the place of a member in ``rows``.

    Also returns, by the names of placeholders and by member, the constants that change.

    Raises:
        Unexplained: as `fill`.
    """
    result = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    constants: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    trackers = {member: _ChangeTracker(member_changes) for member, member_changes in changes.items()}
    for node in graph.nodes:
        new = env[node] = result.node_copy(node, env.__getitem__)
        changing = [member for member, tracker in trackers.items() if tracker.covers(node)]
        if "arguments" not in node.meta and not changing:
            continue
        every = node.meta.get("members", node.meta.get("arguments")) or _arguments(node)
        varying = contains(every, MemberScalars) or changing
        nests = [_of_row(every, row, env) for row in (rows if varying else rows[:1])]
        for member in changing:
            replaced: dict[str, tuple[Tensor, Tensor]] = {}
            nests[member] = ((), trackers[member].apply_changes(node, nests[member][1], replaced))
            for name, pair in replaced.items():
                constants.setdefault(name, {})[member] = pair
        new.meta["members"] = _merged(every, nests, env) if varying else nests[0]
        new.meta["arguments"] = map_aggregate(new.meta["members"], plain)
    for tracker in trackers.values():
        tracker.check()
    return result, constants


def differ_in(graph: fx.Graph, changes: Changes) -> bool:
    """True if members of ``graph`` already differ in each number of ``changes``."""
    open_calls = {
        node.meta["call"]: {name for name, item in node.meta["arguments"][1].items() if contains(item, MemberScalars)}
        for node in graph.nodes
        if "arguments" in node.meta and "call" in node.meta
    }
    return all(path[0] in open_calls.get(call, ()) for call, paths in changes.items() for path in paths)


def _arguments(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    if not isinstance(node.target, OpOverload):
        raise Unexplained(f"{node.target} takes a number of a member")
    return (), by_name(node.target, node.args, node.kwargs)


def _of_row(nest: Any, row: int, env: Mapping[fx.Node, fx.Node]) -> Any:
    return map_aggregate(nest, lambda item: of_member(item, row, env))


def _merged(every: Any, nests: Sequence[Any], env: Mapping[fx.Node, fx.Node]) -> Any:
    """Merge the members' ``nests``, with `MemberScalars` where they differ, or where ``every`` has them."""
    if isinstance(every, MemberScalars):
        return MemberScalars(tuple(nests))
    if isinstance(every, fx.Node):
        return env[every]
    if isinstance(every, dict):
        return {name: _merged(item, [nest[name] for nest in nests], env) for name, item in every.items()}
    if isinstance(every, list | tuple):
        parts = [_merged(item, [nest[index] for nest in nests], env) for index, item in enumerate(every)]
        return tuple(parts) if isinstance(every, tuple) else parts
    return nests[0] if all(same_value(nest, nests[0]) for nest in nests) else MemberScalars(tuple(nests))


class _ChangeTracker:
    """The changes of one member, and which of them were found in the graph."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._visited_calls: set[int] = set()
        self._changed: set[tuple[int, Path]] = set()

    def covers(self, node: fx.Node) -> bool:
        return node.meta.get("call") in self._changes and node.op == "call_function"

    def apply_changes(
        self, node: fx.Node, named: dict[str, Any], constants: dict[str, tuple[Tensor, Tensor]]
    ) -> dict[str, Any]:
        """Return the arguments with their changed numbers filled in."""
        call = node.meta["call"]
        self._visited_calls.add(call)
        result = dict(named)
        for path, (old, new) in self._changes[call].items():
            if path[0] in named and _replaces(named[path[0]], path[1:], old):
                if isinstance(old, Tensor):
                    constants[_at(named[path[0]], path[1:]).name] = old, new
                else:
                    result[path[0]] = _replaced(result[path[0]], path[1:], new)
                self._changed.add((call, path))
        return result

    def check(self) -> None:
        """Raise Unexplained if an operator of the graph does not hold the old value of a number to change."""
        for call, paths in self._changes.items():
            for path in paths:
                # An operator without nodes had a result that is not used.
                if call in self._visited_calls and (call, path) not in self._changed:
                    raise Unexplained(f"argument {path[0]} of operator {call} is not as the code gave it")


def _at(item: Any, path: Path) -> Any:
    for index in path:
        if not isinstance(item, list | tuple) or not isinstance(index, int) or index >= len(item):
            return None
        item = item[index]
    return item


def _replaces(item: Any, path: Path, old: Any) -> bool:
    """True if ``old`` is at ``path``; for a tensor, if a placeholder is, whose value the caller compares."""
    present = _at(item, path)
    if isinstance(old, Tensor):
        return isinstance(present, fx.Node) and present.op == "placeholder"
    return same_value(present, old)


def _replaced(item: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    parts = [_replaced(part, path[1:], new) if index == path[0] else part for index, part in enumerate(item)]
    return tuple(parts) if isinstance(item, tuple) else parts

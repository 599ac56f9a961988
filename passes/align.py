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
    rows = [list(graph.nodes) for graph in graphs]
    if len({len(row) for row in rows}) > 1:
        counts = ", ".join(f"model {variants.index(v)}: {len(row)}" for v, row in enumerate(rows))
        raise FusionError(f"the models' graphs have different numbers of nodes ({counts})")
    envs: list[dict[fx.Node, fx.Node]] = [{} for _ in rows]
    for position, nodes in enumerate(zip(*rows, strict=True)):
        first = nodes[0]
        new = result.node_copy(first, envs[0].__getitem__)
        for v, node in enumerate(nodes):
            envs[v][node] = new
            if (node.op, node.target) != (first.op, first.target):
                raise FusionError(
                    f"step {position} is {first.target} in model {variants.index(0)} and {node.target} in model "
                    f"{variants.index(v)}"
                )
        if len(nodes) > 1 and first.op != "placeholder":
            # By name, with defaults: a graph leaves out an argument that has its default value in one member only.
            named = isinstance(first.target, OpOverload)
            nests: list[Any] = [
                fx.map_arg(_arguments(node) if named else (node.args, node.kwargs), env.__getitem__)
                for node, env in zip(nodes, envs, strict=True)
            ]
            for nest in nests[1:]:
                _check_alike(nests[0], nest, f"step {position}, {first.target},")
            new.meta["arguments"] = _merged(nests[0], [nests[v] for v in variants])
    return result


def _check_alike(first: Any, other: Any, where: str) -> None:
    """Raise FusionError if the arguments of two models differ in more than scalars."""
    if isinstance(first, fx.Node):
        if other is not first:
            raise FusionError(f"{where} has different operands in different models")
    elif isinstance(first, list | tuple):
        if type(other) is not type(first) or len(other) != len(first):
            raise FusionError(f"{where} has {[first, other]} as arguments in the models")
        for pair in zip(first, other, strict=True):
            _check_alike(*pair, where)
    elif isinstance(first, dict):
        for name, item in first.items():
            _check_alike(item, other[name], where)
    elif contains(other, fx.Node):
        raise FusionError(f"{where} has a tensor in some models, and {first} in others")


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
    # By member and call, the changes that were not found yet. A call without nodes had a result that is not used.
    missing: dict[tuple[int, int], dict[Path, Any]] = {}
    for node in graph.nodes:
        new = env[node] = result.node_copy(node, env.__getitem__)
        call = node.meta.get("call") if node.op == "call_function" else None
        changing = [member for member, calls in changes.items() if call in calls]
        if "arguments" not in node.meta and not changing:
            continue
        every = node.meta.get("members", node.meta.get("arguments")) or _arguments(node)
        varying = contains(every, MemberScalars) or changing
        nests = [_of_row(every, row, env) for row in (rows if varying else rows[:1])]
        for member in changing:
            assert call is not None
            absent = missing.setdefault((member, call), dict(changes[member][call]))
            named = dict(nests[member][1])
            for path, (old, new_value) in changes[member][call].items():
                if path[0] in named and _replaces(named[path[0]], path[1:], old):
                    if isinstance(old, Tensor):
                        placeholder = _at(named[path[0]], path[1:])
                        constants.setdefault(placeholder.name, {})[member] = old, new_value
                    else:
                        named[path[0]] = _replaced(named[path[0]], path[1:], new_value)
                    absent.pop(path, None)
            nests[member] = ((), named)
        new.meta["members"] = _merged(every, nests) if varying else nests[0]
        new.meta["arguments"] = map_aggregate(new.meta["members"], plain)
    for (_, call), absent in missing.items():
        for path in absent:
            raise Unexplained(f"argument {path[0]} of operator {call} is not as the code gave it")
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


def _merged(every: Any, nests: Sequence[Any]) -> Any:
    """Merge the members' ``nests``, with `MemberScalars` where they differ, or where ``every`` has them."""
    if isinstance(every, MemberScalars):
        return MemberScalars(tuple(nests))
    if isinstance(every, dict):
        return {name: _merged(item, [nest[name] for nest in nests]) for name, item in every.items()}
    if isinstance(every, list | tuple):
        parts = [_merged(item, [nest[index] for nest in nests]) for index, item in enumerate(every)]
        return tuple(parts) if isinstance(every, tuple) else parts
    alike = isinstance(every, fx.Node) or all(same_value(nest, nests[0]) for nest in nests)
    return nests[0] if alike else MemberScalars(tuple(nests))


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

"""Put the numbers of further members into a graph that one of them was captured as.

Nodes of a capture have in ``meta["call"]`` the index of the operator call in the member's code that they came from. A
change is identified by that index and by the path to the number: the name of the argument, and the index in a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

from hfusion.core.errors import FusionError
from hfusion.core.layout import same_value
from hfusion.core.tree import contains
from hfusion.ops.rule import MemberScalars
from hfusion.passes.align import of_member, plain
from hfusion.passes.candidates import by_name

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
    result = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    constants: dict[str, tuple[Tensor, Tensor]] = {}
    tracker = _ChangeTracker(changes)
    for node in graph.nodes:
        new = env[node] = result.node_copy(node, env.__getitem__)
        if tracker.covers(node):
            named = tracker.apply_changes(node, _arguments(new)[1], constants)
            new.args, new.kwargs = (), named
    tracker.check()
    return result, constants


def fill_rows(
    graph: fx.Graph, rows: Sequence[int], changes: Mapping[int, Changes]
) -> tuple[fx.Graph, dict[str, dict[int, tuple[Tensor, Tensor]]]]:
    """The graph of an array as `hfusion.passes.align.select_rows` gives it, with further members.

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
        nests = [_of_row(every, row, env) for row in rows]
        for member in changing:
            replaced: dict[str, tuple[Tensor, Tensor]] = {}
            nests[member] = ((), trackers[member].apply_changes(node, nests[member][1], replaced))
            for name, pair in replaced.items():
                constants.setdefault(name, {})[member] = pair
        varying = contains(every, MemberScalars) or changing
        new.meta["members"] = _merged(every, nests, env) if varying else nests[0]
        new.meta["arguments"] = map_aggregate(new.meta["members"], plain)
    for tracker in trackers.values():
        tracker.check()
    return result, constants


def varying(graph: fx.Graph, changes: Changes) -> bool:
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

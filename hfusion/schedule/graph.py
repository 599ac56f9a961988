"""Dependency graph of the actions of a minibatch, in networkx."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hfusion.core.errors import PlanError
from hfusion.schedule.actions import Act, Action, estimate

if TYPE_CHECKING:
    import networkx


def graph(name: str, actions: Sequence[Action], load_rate: float, evict_rate: float) -> networkx.DiGraph[Any]:
    """Return the dependency graph: nodes ``(name, index)`` with the ``action`` and its ``seconds``.

    Raises PlanError if actions wait for each other in a cycle, or for one that does not exist.
    """
    import networkx

    made: networkx.DiGraph[Any] = networkx.DiGraph()
    for place, action in enumerate(actions):
        made.add_node((name, place), action=action, seconds=estimate(action, load_rate, evict_rate))
    for place, action in enumerate(actions):
        for before in action.after:
            if before >= len(actions):
                raise PlanError(f"task {name!r}: action {place} comes after {before}, but there are {len(actions)}")
            if before >= 0:
                made.add_edge((name, before), (name, place))
    if not networkx.is_directed_acyclic_graph(made):
        circle = " -> ".join(str(before[1]) for before, _ in networkx.find_cycle(made))
        raise PlanError(f"task {name!r}: actions wait for one another in a circle: {circle}")
    return made


def earliest_ends(made: networkx.DiGraph[Any]) -> dict[Any, float]:
    """Return the seconds at which each action ends if it starts as soon as its predecessors have ended."""
    import networkx

    ends: dict[Any, float] = {}
    for node in networkx.topological_sort(made):
        ends[node] = max((ends[each] for each in made.predecessors(node)), default=0.0) + made.nodes[node]["seconds"]
    return ends


def critical_path(made: networkx.DiGraph[Any]) -> list[Any]:
    """Return the longest path that ends in a computation; later evictions do not count."""
    ends = earliest_ends(made)
    before = [node for node in made if made.nodes[node]["action"].act is not Act.EVICT]
    path: list[Any] = []
    while before:
        path.append(max(before, key=ends.__getitem__))
        before = [*made.predecessors(path[-1])]
    return path[::-1]


def longest_seconds(made: networkx.DiGraph[Any]) -> float:
    """Return the earliest time, in seconds, at which all computations can have ended."""
    return math.fsum(made.nodes[node]["seconds"] for node in critical_path(made))

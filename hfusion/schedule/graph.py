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

    digraph: networkx.DiGraph[Any] = networkx.DiGraph()
    for index, action in enumerate(actions):
        digraph.add_node((name, index), action=action, seconds=estimate(action, load_rate, evict_rate))
    for index, action in enumerate(actions):
        for predecessor in action.after:
            if predecessor >= len(actions):
                raise PlanError(
                    f"task {name!r}: action {index} comes after {predecessor}, but there are {len(actions)}"
                )
            if predecessor >= 0:
                digraph.add_edge((name, predecessor), (name, index))
    if not networkx.is_directed_acyclic_graph(digraph):
        circle = " -> ".join(str(predecessor[1]) for predecessor, _ in networkx.find_cycle(digraph))
        raise PlanError(f"task {name!r}: actions wait for one another in a circle: {circle}")
    return digraph


def earliest_ends(digraph: networkx.DiGraph[Any]) -> dict[Any, float]:
    """Return the seconds at which each action ends if it starts as soon as its predecessors have ended."""
    import networkx

    ends: dict[Any, float] = {}
    for node in networkx.topological_sort(digraph):
        ends[node] = (
            max((ends[predecessor] for predecessor in digraph.predecessors(node)), default=0.0)
            + digraph.nodes[node]["seconds"]
        )
    return ends


def critical_path(digraph: networkx.DiGraph[Any]) -> list[Any]:
    """Return the longest path that ends in a computation; later evictions do not count."""
    ends = earliest_ends(digraph)
    candidates = [node for node in digraph if digraph.nodes[node]["action"].act is not Act.EVICT]
    path: list[Any] = []
    while candidates:
        path.append(max(candidates, key=ends.__getitem__))
        candidates = [*digraph.predecessors(path[-1])]
    return path[::-1]


def longest_seconds(digraph: networkx.DiGraph[Any]) -> float:
    """Return the earliest time, in seconds, at which all computations can have ended."""
    return math.fsum(digraph.nodes[node]["seconds"] for node in critical_path(digraph))

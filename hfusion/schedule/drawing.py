"""Drawings of plans: the needs of the tasks, and the dependencies between actions. Requires matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hfusion.schedule.actions import Act
from hfusion.schedule.graph import critical_path, earliest_ends
from hfusion.schedule.task_plan import TaskPlan

if TYPE_CHECKING:
    import networkx
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The position of an action in the row of its shard.
_HEIGHTS = {"in": 0.15, "compute": 0.5, "out": 0.85}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; its size is in inches. Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("draw() needs matplotlib: pip install matplotlib (extra: hfusion[plot])") from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_bytes(tasks: Sequence[TaskPlan], devices: Mapping[str, int], axes: Axes) -> None:
    """Draw the bytes of each task by kind, and its need on a device, next to the devices' budgets."""
    names = [task.name for task in tasks]
    left_edges = [0.0] * len(names)
    for kind in ("weights", "gradients", "optimizer", "activations"):
        sizes = [sum(getattr(shard, kind) for shard in task.shards) / 2**20 for task in tasks]
        axes.barh(names, sizes, left=left_edges, label=f"{kind}, all shards")
        left_edges = [a + b for a, b in zip(left_edges, sizes, strict=True)]
    needs = [task.device_bytes / 2**20 for task in tasks]
    axes.plot(needs, names, "k|", markersize=14, markeredgewidth=2, label="needed at once")
    for number, budget in enumerate(sorted(set(devices.values()))):
        axes.axvline(budget / 2**20, color="gray", linestyle="--", label=None if number else "budget")
    axes.invert_yaxis()
    axes.set_xlabel("MiB")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def draw_graph(name: str, digraph: networkx.DiGraph[Any], axes: Axes) -> None:
    """Draw the actions of a task's minibatch, each as early as its predecessors allow. The longest path is red."""
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    ends, path = earliest_ends(digraph), critical_path(digraph)
    actions = {node: digraph.nodes[node]["action"] for node in digraph}
    starts = {node: ends[node] - digraph.nodes[node]["seconds"] for node in digraph}
    heights = {node: action.shard + _HEIGHTS[action.act.lane] for node, action in actions.items()}
    nodes: dict[Act, list[Any]] = defaultdict(list)
    for node, action in actions.items():
        nodes[action.act].append(node)
    for number, act in enumerate(act for act in Act if act in nodes):
        colour = colormaps["tab10"](number)
        spans = [[(starts[node], heights[node]), (ends[node], heights[node])] for node in nodes[act]]
        axes.add_collection(LineCollection(spans, colors=[colour], linewidths=6, label=act.lower()))
        axes.plot([span[0][0] for span in spans], [heights[node] for node in nodes[act]], ".", color=colour)
    for edges, look in ((digraph.edges, ("gray", 0.5, None)), (pairwise(path), ("red", 1.5, "longest path"))):
        lines = [[(ends[a], heights[a]), (starts[b], heights[b])] for a, b in edges]
        axes.add_collection(LineCollection(lines, colors=look[0], linewidths=look[1], label=look[2]))
    axes.set_yticks([shard + 0.5 for shard in range(1 + max(action.shard for action in actions.values()))])
    axes.set_yticklabels([str(shard) for shard in range(len(axes.get_yticks()))])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_ylabel("shard: in, compute, out")
    axes.set_title(f"a minibatch of {name}, longest path {ends[path[-1]]:.4g} s", fontsize="medium")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)

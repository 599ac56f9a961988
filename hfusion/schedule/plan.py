"""The vocabulary of plans: many tasks, each cut into shards, on devices with budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hfusion.core.errors import PlanError
from hfusion.core.text import aligned, folded, html_table, readable
from hfusion.schedule.actions import Act, Phase, Shard, Unit, estimate
from hfusion.schedule.task_plan import TaskPlan

if TYPE_CHECKING:
    import networkx

__all__ = ["Phase", "Plan", "Shard", "TaskPlan", "Unit"]

_HEAD = ("task", "mode", "width", "shards", "steps", "s/step", "stays", "device", "of budget", "moved/step")
# The most devices that are listed when a plan is printed.
_SHOWN = 8


@dataclass(frozen=True, repr=False)
class Plan:
    """Tasks on devices.

    Attributes:
        tasks: the plans of the tasks.
        devices: names and budgets in bytes.
        load_rate, evict_rate: bytes/s from host to device and back. Each device has its own link.
        action_seconds: the overhead of an action that computes.

    Raises:
        PlanError: names repeat, there is no device, a number is out of range, or a task fits no device.
    """

    tasks: tuple[TaskPlan, ...]
    devices: Mapping[str, int]
    load_rate: float
    evict_rate: float
    action_seconds: float = 0.0

    def __post_init__(self) -> None:
        names: set[str] = set()
        for task in self.tasks:
            if task.name in names:
                raise PlanError(f"two tasks are named {task.name!r}: give each its own name")
            names.add(task.name)
        if not self.devices:
            raise PlanError("the plan has no device: give at least one")
        for name in self.devices:
            if not name or any(character.isspace() for character in name):
                raise PlanError(f"device {name!r}: a name is one word without spaces")
        for label, rate in (("load_rate", self.load_rate), ("evict_rate", self.evict_rate)):
            if not rate > 0:
                raise PlanError(f"{label} is {rate} bytes/s: it must be positive")
        if not 0 <= self.action_seconds < math.inf:
            raise PlanError(f"action_seconds is {self.action_seconds}: it must be finite and at least 0")
        self._check_room()

    def _check_room(self) -> None:
        largest = max(self.devices, key=lambda name: self.devices[name])
        budget = self.devices[largest]
        for task in self.tasks:
            if task.device_bytes > budget:
                mode, remedy = ("resident", "spill it") if task.resident else ("spilled", "cut more shards")
                raise PlanError(
                    f"task {task.name!r} needs {task.device_bytes:,} bytes on one device ({mode}, "
                    f"{len(task.shards)} shards), but the largest budget is {budget:,} bytes, of {largest!r}: "
                    f"the smallest budget that would do is {task.device_bytes:,} bytes; or {remedy}"
                )

    @cached_property
    def lower_bound(self) -> float:
        """A lower bound for the seconds of any schedule: max(longest path of a task, total work / devices)."""
        if not self.tasks:
            return 0.0
        work = math.fsum(task.seconds for task in self.tasks)
        return max(max(map(self._longest, self.tasks)), work / len(self.devices))

    def _longest(self, task: TaskPlan) -> float:
        """Return the seconds of a task that never waits for a device. Nothing is loaded at its start."""
        first = task.seconds
        if task.closes(0):
            ends = list[float]()
            for action in task.training:
                start = max((ends[before] for before in action.after if before >= 0), default=0.0)
                ends.append(start + estimate(action, self.load_rate, self.evict_rate))
            # Evictions after the last computation do not count.
            longest = max(end for end, action in zip(ends, task.training, strict=True) if action.act is not Act.EVICT)
            first += max(0.0, longest - math.fsum(action.seconds for action in task.training))
        return first

    def graph(self) -> networkx.DiGraph[Any]:
        """Return what the actions of one minibatch of every task wait for, with its optimizer step.

        Nodes are ``(task, index)``, with the ``action`` and its estimated ``seconds``.
        """
        # Imported late: nothing else needs graphs.
        import networkx

        graph: networkx.DiGraph[Any] = networkx.DiGraph()
        for task in self.tasks:
            for index, action in enumerate(task.training):
                seconds = estimate(action, self.load_rate, self.evict_rate)
                graph.add_node((task.name, index), action=action, seconds=seconds)
                before = [(task.name, number) for number in action.after if number >= 0]
                graph.add_edges_from((node, (task.name, index)) for node in before)
        return graph

    def _headline(self) -> str:
        names = ", ".join(f"{name} {readable(budget)}" for name, budget in [*self.devices.items()][:_SHOWN])
        rest = f", and {len(self.devices) - _SHOWN} more" if len(self.devices) > _SHOWN else ""
        rates = f"host to device {readable(self.load_rate)}/s, back {readable(self.evict_rate)}/s"
        return f"plan  {len(self.tasks)} tasks  {len(self.devices)} devices: {names}{rest}  ({rates})"

    def __str__(self) -> str:
        largest = max(self.devices.values())
        rows = [_row(task, largest) for task in self.tasks]
        return "\n".join([self._headline(), *aligned([_HEAD, *rows], left=2)])

    def __repr__(self) -> str:
        return f"<{self._headline()}>"

    def _repr_html_(self) -> str:
        largest = max(self.devices.values())
        rows = (_row(task, largest) for task in self.tasks)
        return folded(self._headline(), html_table(_HEAD, rows, len(self.tasks)), is_open=True)


def _stays(task: TaskPlan) -> str:
    """Describe the shards that a task keeps on its device."""
    return "all" if task.resident else readable(sum(map(task.host_bytes, task.pinned))) if task.pinned else "-"


def _row(task: TaskPlan, largest: int) -> tuple[str, ...]:
    return (
        task.name,
        "resident" if task.resident else "spilled",
        str(task.width),
        str(len(task.shards)),
        str(task.steps),
        f"{task.step_seconds:.4g}",
        _stays(task),
        readable(task.device_bytes),
        f"{task.device_bytes / largest:.0%}" if largest else "-",
        readable(sum(task.moved_bytes)),
    )

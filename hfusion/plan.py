"""The vocabulary of shards: what a shard needs and costs, the shards of a task, and a plan of many tasks.

A spilled task keeps its state in host memory: before a unit (the forward or the backward of one shard) what
the unit needs is loaded, afterwards it is evicted, and the backward recomputes the shard from what is alive
at its input cut (Hydra, arXiv:2110.08633; recomputation: Chen et al., arXiv:1604.06174). A resident task
holds all shards with their saved activations on one device. Bytes are whole numbers, times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from hfusion.errors import PlanError


class Direction(StrEnum):
    """The two passes of a minibatch. The optimizer step of a shard belongs to its backward unit."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Shard:
    """Nodes ``[first, last)`` of the linearised graph, and what one minibatch of all members costs there.

    Bytes on the device:
        weights: parameters and buffers.
        gradients: of the parameters that are trained.
        optimizer: state of the optimizer for them.
        activations: saved between forward and backward inside the shard.
        workspace: the most that is alive for a moment while one of its nodes runs.
        boundary: what is alive at its output cut, inputs of later shards included; 0 for the last shard.
    Seconds: ``forward``, ``backward`` (without the recomputation), ``step`` (its optimizer step).
    """

    index: int
    first: int
    last: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    boundary: int
    forward: float
    backward: float
    step: float

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise PlanError(f"shard {self.index} holds nodes [{self.first}, {self.last}): give it at least one")
        for field in fields(self)[3:]:
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(f"shard {self.index}: {field.name} is {value}: it must be finite and at least 0")

    @property
    def load_bytes(self) -> int:
        """Bytes of the buffer that moves for backward and step: weights, gradients, optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def resident_bytes(self) -> int:
        """Bytes the shard holds while its task is resident: the buffer, saved activations, its output cut."""
        return self.load_bytes + self.activations + self.boundary

    @property
    def seconds(self) -> float:
        """Seconds of one minibatch when nothing is recomputed."""
        return self.forward + self.backward + self.step


@dataclass(frozen=True)
class Unit:
    """What is scheduled: one direction of one shard on one minibatch (``step``) of a task."""

    task: str
    step: int
    direction: Direction
    shard: int


@dataclass(frozen=True)
class TaskPlan:
    """How one task is trained: its shards in graph order, for ``steps`` minibatches of ``width`` members.

    ``resident``: all shards stay on the device while the task is on it; else it is spilled, shard by shard.
    """

    name: str
    shards: tuple[Shard, ...]
    steps: int
    resident: bool
    width: int = 1

    def __post_init__(self) -> None:
        if not self.name or any(character.isspace() for character in self.name):
            raise PlanError(f"task {self.name!r}: a name is one word without spaces")
        if not self.shards or self.steps < 1 or self.width < 1:
            counts = f"{len(self.shards)} shards, {self.steps} steps, width {self.width}"
            raise PlanError(f"task {self.name!r} has {counts}: each must be at least 1")
        for position, shard in enumerate(self.shards):
            if shard.index != position:
                raise PlanError(f"task {self.name!r}: shard {position} carries the index {shard.index}")
            if position and self.shards[position - 1].last != shard.first:
                gap = f"shard {position} begins at node {shard.first}"
                raise PlanError(f"task {self.name!r}: {gap}, the one before ends at {self.shards[position - 1].last}")

    @property
    def units(self) -> int:
        """Number of units of the whole task."""
        return 2 * len(self.shards) * self.steps

    def unit(self, number: int) -> Unit:
        """The unit at position ``number``: per step the forwards ascending, then the backwards descending."""
        step, place = divmod(number, 2 * len(self.shards))
        if place < len(self.shards):
            return Unit(self.name, step, Direction.FORWARD, place)
        return Unit(self.name, step, Direction.BACKWARD, 2 * len(self.shards) - 1 - place)

    def whole(self, direction: Direction, shard: int) -> bool:
        """Whether the unit has the shard's whole buffer loaded, not only its weights.

        The last shard turns from forward to backward in place, so it comes whole at once.
        """
        return self.resident or direction is Direction.BACKWARD or self._turns(shard)

    def held_bytes(self, direction: Direction, shard: int) -> int:
        """Bytes that the loaded shard holds on the device from its LOAD to its EVICT."""
        part = self.shards[shard]
        if self.resident:
            return part.resident_bytes
        if not self.whole(direction, shard):
            return part.weights + self._entry(shard)
        saved = part.activations if self._turns(shard) else 0
        return part.load_bytes + self._entry(shard) + part.boundary + saved

    def extra_bytes(self, direction: Direction, shard: int) -> int:
        """Bytes that the unit takes on top of what is held, only while it runs."""
        part = self.shards[shard]
        if self.resident or self._turns(shard):
            return part.workspace
        if direction is Direction.BACKWARD:
            return part.workspace + part.activations
        return part.workspace + part.boundary

    def in_bytes(self, direction: Direction, shard: int) -> int:
        """Bytes that a LOAD for this unit moves to the device."""
        part = self.shards[shard]
        if direction is Direction.FORWARD and self.whole(direction, shard):
            return part.load_bytes + self._entry(shard)
        return self.held_bytes(direction, shard)

    def out_bytes(self, direction: Direction, shard: int) -> int:
        """Bytes that an EVICT after this unit moves back: a forward alone changes no weights."""
        part = self.shards[shard]
        if direction is Direction.FORWARD:
            return self.held_bytes(direction, shard) if self.whole(direction, shard) else part.boundary
        return part.load_bytes + self._entry(shard)

    def _entry(self, shard: int) -> int:
        """Bytes at the input cut."""
        return self.shards[shard - 1].boundary if shard else 0

    def _turns(self, shard: int) -> bool:
        """Whether the backward follows the forward at once, so that activations are kept, not recomputed."""
        return shard == len(self.shards) - 1

    def backward_seconds(self, shard: int) -> float:
        """Seconds of the backward, with the recomputed forward of a spilled task; the step is not in it."""
        part = self.shards[shard]
        again = 0.0 if self.resident or self._turns(shard) else part.forward
        return part.backward + again

    def unit_seconds(self, direction: Direction, shard: int) -> float:
        """Seconds a unit computes: its forward, or its backward and step."""
        part = self.shards[shard]
        return part.forward if direction is Direction.FORWARD else self.backward_seconds(shard) + part.step

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of computing per minibatch."""
        return math.fsum(self.unit_seconds(direction, shard.index) for shard in self.shards for direction in Direction)

    @property
    def seconds(self) -> float:
        """Seconds of computing of the whole task."""
        return self.steps * self.step_seconds

    @cached_property
    def device_bytes(self) -> int:
        """The smallest budget of a device that can run the task."""
        extras = [self.extra_bytes(way, shard.index) for shard in self.shards for way in Direction]
        if self.resident:
            return sum(shard.resident_bytes for shard in self.shards) + max(extras)
        held = [self.held_bytes(way, shard.index) for shard in self.shards for way in Direction]
        return max(a + b for a, b in zip(held, extras, strict=True))


@dataclass(frozen=True)
class Plan:
    """Tasks on devices.

    ``devices`` maps names to budgets in bytes; ``load_rate`` and ``evict_rate`` are the bytes/s from host to
    device and back, each device having a link of its own. Raises PlanError for names that repeat, no device,
    rates that are not positive, and a task that fits no device.
    """

    tasks: tuple[TaskPlan, ...]
    devices: Mapping[str, int]
    load_rate: float
    evict_rate: float

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for task in self.tasks:
            if task.name in seen:
                raise PlanError(f"two tasks are named {task.name!r}: give each its own name")
            seen.add(task.name)
        if not self.devices:
            raise PlanError("the plan has no device: give at least one")
        for name in self.devices:
            if not name or any(character.isspace() for character in name):
                raise PlanError(f"device {name!r}: a name is one word without spaces")
        for label, rate in (("load_rate", self.load_rate), ("evict_rate", self.evict_rate)):
            if not rate > 0:
                raise PlanError(f"{label} is {rate} bytes/s: it must be positive")
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

    @property
    def lower_bound(self) -> float:
        """Seconds that no schedule beats: max(longest task, total work / devices), computing only."""
        if not self.tasks:
            return 0.0
        work = [task.seconds for task in self.tasks]
        return max(max(work), math.fsum(work) / len(self.devices))

    def __str__(self) -> str:
        head = ("task", "mode", "width", "shards", "steps", "s/step", "device", "of budget", "moved/step")
        largest = max(self.devices.values())
        rows = [_row(task, largest) for task in self.tasks]
        names = ", ".join(f"{name} {readable(budget)}" for name, budget in _few(list(self.devices.items())))
        rest = f", and {len(self.devices) - SHOWN} more" if len(self.devices) > SHOWN else ""
        rates = f"host to device {readable(self.load_rate)}/s, back {readable(self.evict_rate)}/s"
        lines = [f"plan  {len(self.tasks)} tasks  {len(self.devices)} devices: {names}{rest}  ({rates})"]
        return "\n".join([*lines, *_aligned([head, *rows])])

    def draw(self, path: str | Path) -> None:
        """Draw the bytes of each task by kind, and what it needs of a device, against the budgets.

        Needs matplotlib.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1.6 + 0.35 * len(self.tasks)), layout="constrained")
        axes = figure.subplots()
        names = [task.name for task in self.tasks]
        left = [0.0] * len(names)
        for kind in ("weights", "gradients", "optimizer", "activations"):
            sizes = [sum(getattr(shard, kind) for shard in task.shards) / 2**20 for task in self.tasks]
            axes.barh(names, sizes, left=left, label=f"{kind}, all shards")
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        needs = [task.device_bytes / 2**20 for task in self.tasks]
        axes.plot(needs, names, "k|", markersize=14, markeredgewidth=2, label="needed at once")
        for number, budget in enumerate(sorted(set(self.devices.values()))):
            axes.axvline(budget / 2**20, color="gray", linestyle="--", label=None if number else "budget")
        axes.invert_yaxis()
        axes.set_xlabel("MiB")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        figure.savefig(path)


SHOWN = 8


def _few(items: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return items[:SHOWN]


def readable(count: float) -> str:
    """Bytes for people, with binary prefixes.

    >>> readable(3 * 1024**3)
    '3.0GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f}B" if unit == "B" else f"{count:.1f}{unit}"
        count /= 1024
    return f"{count:.1f}TiB"


def _row(task: TaskPlan, largest: int) -> tuple[str, ...]:
    moved = (
        0
        if task.resident
        else sum(
            task.in_bytes(way, shard.index) + task.out_bytes(way, shard.index)
            for shard in task.shards
            for way in Direction
        )
    )
    return (
        task.name,
        "resident" if task.resident else "spilled",
        str(task.width),
        str(len(task.shards)),
        str(task.steps),
        f"{task.step_seconds:.4g}",
        readable(task.device_bytes),
        f"{task.device_bytes / largest:.0%}" if largest else "-",
        readable(moved),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

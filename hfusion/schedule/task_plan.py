"""The shards of a task, the order in which they run, and what each unit needs and costs.

A spilled task keeps its state in host memory: before a unit (one direction of one shard) what the unit needs is
loaded, afterwards it is evicted, and the backward recomputes the shard from what is alive at its input cut
(Hydra, arXiv:2110.08633; recomputation: Chen et al., arXiv:1604.06174). A resident task holds all shards with
their saved activations on one device; should it leave in the midst of a minibatch, it takes along what is alive at
the cuts and recomputes, which is not planned for. In between, a spilled task may keep its last shard on the device, and
only the others come and go. Bytes are whole numbers, times are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hfusion.core.errors import PlanError
from hfusion.schedule.shards import Direction, Shard, Unit


@dataclass(frozen=True)
class TaskPlan:
    """How one task is trained: its shards in graph order, for ``steps`` minibatches of ``width`` members.

    Args:
        resident: all shards stay on the device while the task is on it; else it is spilled, shard by shard.
        epoch: minibatches of an epoch, of which ``steps`` is a multiple; None: all are one epoch.
        accumulate: minibatches whose gradients are summed before the optimizer steps. The last group of an
            epoch may be shorter.
        clipped: the optimizer steps only when the gradients of all shards are there, since it scales them by
            their global norm. The steps are then units of their own.
        evaluated: minibatches that are evaluated after every epoch.
        kept: the last shard of a spilled task, once loaded, stays on the device while the task does.

    Raises PlanError for values out of range and shards that do not follow one another.
    """

    name: str
    shards: tuple[Shard, ...]
    steps: int
    resident: bool
    width: int = 1
    epoch: int | None = None
    accumulate: int = 1
    clipped: bool = False
    evaluated: int = 0
    kept: bool = False

    def __post_init__(self) -> None:
        if not self.name or any(character.isspace() for character in self.name):
            raise PlanError(f"task {self.name!r}: a name is one word without spaces")
        if not self.shards or min(self.steps, self.width, self.accumulate) < 1:
            counts = f"{len(self.shards)} shards, {self.steps} steps, width {self.width}, accumulate {self.accumulate}"
            raise PlanError(f"task {self.name!r} has {counts}: each must be at least 1")
        if self.epoch is not None and (self.epoch < 1 or self.steps % self.epoch):
            counts = f"{self.steps} steps in epochs of {self.epoch}"
            raise PlanError(f"task {self.name!r} has {counts}: give steps as a whole number of epochs of at least 1")
        self._check_shards()

    def _check_shards(self) -> None:
        for position, shard in enumerate(self.shards):
            if shard.index != position:
                raise PlanError(f"task {self.name!r}: shard {position} carries the index {shard.index}")
            if position and self.shards[position - 1].last != shard.first:
                gap = f"shard {position} begins at node {shard.first}"
                raise PlanError(f"task {self.name!r}: {gap}, the one before ends at {self.shards[position - 1].last}")

    @cached_property
    def _epoch(self) -> int:
        """Minibatches of an epoch."""
        return self.steps if self.epoch is None else self.epoch

    @cached_property
    def _group_units(self) -> int:
        """Units of a full group: of its minibatches, and the optimizer steps where they are units."""
        return (2 * self.accumulate + self.clipped) * len(self.shards)

    @cached_property
    def _trained_units(self) -> int:
        """Units of an epoch before its evaluation."""
        groups = math.ceil(self._epoch / self.accumulate)
        return (2 * self._epoch + groups * self.clipped) * len(self.shards)

    @cached_property
    def _epoch_units(self) -> int:
        return self._trained_units + self.evaluated * len(self.shards)

    @property
    def epochs(self) -> int:
        """How often it goes through its minibatches."""
        return self.steps // self._epoch

    @cached_property
    def units(self) -> int:
        """Number of units of the whole task."""
        return self.epochs * self._epoch_units

    @cached_property
    def update_count(self) -> int:
        """Number of optimizer steps of each shard in the whole task."""
        return self.epochs * math.ceil(self._epoch / self.accumulate)

    def unit(self, number: int) -> Unit:
        """The unit at position ``number``.

        Per minibatch the forwards ascending, then the backwards descending; after the last minibatch of a
        group, if the task is clipped, the updates ascending; after an epoch its evaluation, shards ascending.
        """
        count = len(self.shards)
        epoch, rest = divmod(number, self._epoch_units)
        if rest >= self._trained_units:
            index, place = divmod(rest - self._trained_units, count)
            return Unit(self.name, epoch * self.evaluated + index, Direction.EVALUATE, place, False)
        group, rest = divmod(rest, self._group_units)
        index, place = divmod(rest, 2 * count)
        size = min(self.accumulate, self._epoch - group * self.accumulate)
        first = epoch * self._epoch + group * self.accumulate
        if index == size:
            return Unit(self.name, first + size - 1, Direction.UPDATE, place, True)
        if place < count:
            return Unit(self.name, first + index, Direction.FORWARD, place, False)
        updates = index == size - 1 and not self.clipped
        return Unit(self.name, first + index, Direction.BACKWARD, 2 * count - 1 - place, updates)

    def closes(self, step: int) -> bool:
        """Whether the optimizer steps after this minibatch: it is the last of its group or of its epoch."""
        ended = step % self._epoch + 1
        return ended == self._epoch or ended % self.accumulate == 0

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The directions of its units."""
        update = (Direction.UPDATE,) if self.clipped else ()
        evaluate = (Direction.EVALUATE,) if self.evaluated else ()
        return (Direction.FORWARD, Direction.BACKWARD, *update, *evaluate)

    def often(self, direction: Direction) -> float:
        """How many units of a direction each shard has per minibatch, in the mean."""
        counts = {Direction.UPDATE: self.update_count, Direction.EVALUATE: self.epochs * self.evaluated}
        return counts.get(direction, self.steps) / self.steps

    @property
    def carried(self) -> bool:
        """Whether gradients outlive their backward unit, so that they move to and from the host."""
        return self.accumulate > 1 or self.clipped

    def whole(self, direction: Direction, shard: int) -> bool:
        """Whether the unit has more of the shard's state loaded than its weights.

        The last shard turns from forward to backward in place, so it comes whole at once.
        """
        if direction is Direction.FORWARD:
            return self.resident or self.turns(shard)
        return self.resident or self.keeps(shard) or direction is not Direction.EVALUATE

    def recomputes(self, direction: Direction, shard: int) -> bool:
        """Whether a unit is a backward that begins with the forward of its shard again."""
        return direction is Direction.BACKWARD and not (self.resident or self.turns(shard))

    def again_bytes(self, shard: int) -> int:
        """Bytes of a backward that recomputes which it takes for that; it takes the rest of its extra afterwards."""
        part = self.shards[shard]
        return min(part.peak, part.activations + part.workspace)

    def keeps(self, shard: int) -> bool:
        """Whether a shard of a spilled task stays loaded between its units."""
        return self.kept and self.turns(shard) and not self.resident

    def beside_bytes(self, shard: int) -> int:
        """Bytes of what stays loaded beside a shard of a spilled task."""
        last = len(self.shards) - 1
        return self.home_bytes(last) if shard != last and self.keeps(last) else 0

    def stays(self, before: Unit, after: Unit) -> bool:
        """Whether what a spilled task has loaded for a unit is all that the next one needs.

        An update needs the optimizer state, for which a backward of a clipped task leaves no room.
        """
        if before.shard != after.shard:
            return False
        if self.keeps(after.shard):
            return True
        if Direction.UPDATE in (before.direction, after.direction):
            return False
        return before.direction is not Direction.EVALUATE or after.direction is Direction.EVALUATE

    def goes_on(self, after: Unit) -> bool:
        """Whether a unit must follow the one before it at once: the last shard turns from forward to backward."""
        return after.direction is Direction.BACKWARD and self.turns(after.shard)

    def home_bytes(self, shard: int) -> int:
        """Bytes of a shard at rest: weights, optimizer state, gradients if they outlive a unit."""
        part = self.shards[shard]
        return part.weights + part.optimizer + self._carried(part)

    def held_bytes(self, direction: Direction, shard: int) -> int:
        """Bytes that the loaded shard holds on the device from its LOAD to its EVICT."""
        return self._sizes[direction][shard][0]

    def extra_bytes(self, direction: Direction, shard: int) -> int:
        """Bytes the unit has on top of what is held while it runs, some of them until the backward after it ends."""
        return self._sizes[direction][shard][1]

    def fresh_bytes(self, direction: Direction, shard: int) -> int:
        """What of these the unit takes when it begins: the unit before may have left some."""
        return self._sizes[direction][shard][2]

    def freed_bytes(self, direction: Direction, shard: int) -> int:
        """What of these is free when the unit ends."""
        return self._sizes[direction][shard][3]

    @cached_property
    def _sizes(self) -> dict[Direction, list[tuple[int, int, int, int]]]:
        """Bytes held, extra, fresh and freed, of each shard; who runs units asks for them all the time."""
        shards = range(len(self.shards))
        return {way: [self._size(way, shard) for shard in shards] for way in Direction}

    def _size(self, direction: Direction, shard: int) -> tuple[int, int, int, int]:
        held, extra = self._held(direction, shard), self._extra(direction, shard)
        turning = 0 if self.resident or not self.turns(shard) else self._turning(shard)
        before = turning if direction is Direction.BACKWARD else 0
        after = turning if direction is Direction.FORWARD else 0
        return held, extra, extra - before, extra - after

    def _held(self, direction: Direction, shard: int) -> int:
        part = self.shards[shard]
        if self.resident:
            return self.home_bytes(shard) + part.activations + part.boundary
        if direction is Direction.UPDATE or self.keeps(shard):
            return self.home_bytes(shard)
        if not self.whole(direction, shard):
            return part.weights + self._entry(shard)
        state = part.weights + self._carried(part) + self._stepped(part)
        return state if self.turns(shard) else state + self._entry(shard) + part.boundary

    def _extra(self, direction: Direction, shard: int) -> int:
        part = self.shards[shard]
        if direction is Direction.UPDATE:
            return 0
        if self.resident:
            return max(0, part.peak - part.activations) if direction is Direction.BACKWARD else part.workspace
        if not self.turns(shard):
            return part.peak if direction is Direction.BACKWARD else part.workspace + part.boundary
        if direction is Direction.EVALUATE:
            return part.workspace + part.boundary + (self._entry(shard) if self.keeps(shard) else 0)
        more = part.workspace if direction is Direction.FORWARD else max(0, part.peak - part.activations)
        return self._turning(shard) + more

    def _turning(self, shard: int) -> int:
        """Bytes that the last shard of a spilled task has alive between its forward and its backward."""
        part = self.shards[shard]
        return self._entry(shard) + part.boundary + part.activations

    @cached_property
    def overlapped_bytes(self) -> int:
        """The smallest budget in which, while a unit of a spilled task runs, the next one's shard can be loaded."""
        order = [(way, shard.index) for way in self.directions for shard in self.shards]
        count = len(self.shards)
        order[count : 2 * count] = reversed(order[count : 2 * count])
        return max(
            self._alone(*unit) + (self.held_bytes(*after) if after[1] != unit[1] and not self.keeps(after[1]) else 0)
            for unit, after in zip(order, [*order[1:], order[0]], strict=True)
        )

    def _alone(self, direction: Direction, shard: int) -> int:
        """Bytes on the device while a unit of a spilled task runs and nothing is loaded for others."""
        return self.held_bytes(direction, shard) + self.extra_bytes(direction, shard) + self.beside_bytes(shard)

    def in_bytes(self, direction: Direction, shard: int) -> int:
        """Bytes that a LOAD for this unit moves to the device."""
        part = self.shards[shard]
        if direction is Direction.UPDATE:
            return self.home_bytes(shard)
        if not self.whole(direction, shard):
            return part.weights + self._entry(shard)
        if self.resident:
            return (
                self.home_bytes(shard) + self._entry(shard) + (part.boundary if direction is Direction.BACKWARD else 0)
            )
        if direction is Direction.BACKWARD and self.turns(shard):
            return 0
        optimizer = part.optimizer if self.keeps(shard) else self._stepped(part)
        state = part.weights + optimizer + self._carried(part) + self._entry(shard)
        return state + (part.boundary if direction is Direction.BACKWARD else 0)

    def out_bytes(self, direction: Direction, shard: int) -> int:
        """Bytes that an EVICT after this unit moves back; a forward changes no weights, a frozen weight never."""
        part = self.shards[shard]
        if self.resident:
            alive = {Direction.UPDATE: 0, Direction.BACKWARD: self._entry(shard)}
            return self.home_bytes(shard) + alive.get(direction, part.boundary)
        if direction is Direction.UPDATE:
            return part.weights - part.frozen + part.optimizer
        if direction in (Direction.FORWARD, Direction.EVALUATE):
            return part.boundary
        changed = 0 if self.clipped else part.weights - part.frozen + part.optimizer
        return changed + self._carried(part) + self._entry(shard)

    @property
    def moved_bytes(self) -> tuple[float, float]:
        """Bytes per minibatch, in the mean, to the device and back: what is not kept comes and goes with each unit."""
        if self.resident:
            return 0.0, 0.0
        coming = [shard.index for shard in self.shards if not self.keeps(shard.index)]
        units = [(way, shard) for way in self.directions for shard in coming]
        return (
            sum(self.often(way) * self.in_bytes(way, shard) for way, shard in units),
            sum(self.often(way) * self.out_bytes(way, shard) for way, shard in units),
        )

    def _entry(self, shard: int) -> int:
        """Bytes at the input cut."""
        return self.shards[shard - 1].boundary if shard else 0

    def turns(self, shard: int) -> bool:
        """Whether the backward follows the forward at once, so that activations are kept, not recomputed."""
        return shard == len(self.shards) - 1

    def _stepped(self, part: Shard) -> int:
        """Bytes of the optimizer state, if the backward of a spilled shard needs it."""
        return 0 if self.clipped else part.optimizer

    def _carried(self, part: Shard) -> int:
        """Bytes of gradients, if they move."""
        return part.gradients if self.carried else 0

    def backward_seconds(self, shard: int) -> float:
        """Seconds of the backward, with the recomputed forward of a spilled task; the step is not in it."""
        part = self.shards[shard]
        return part.backward + (part.forward if self.recomputes(Direction.BACKWARD, shard) else 0.0)

    def pass_seconds(self, direction: Direction, shard: int) -> float:
        """Seconds a unit computes before the optimizer step that it may end with."""
        if direction is Direction.UPDATE:
            return 0.0
        return self.backward_seconds(shard) if direction is Direction.BACKWARD else self.shards[shard].forward

    def unit_seconds(self, unit: Unit) -> float:
        """Seconds a unit computes."""
        step = self.shards[unit.shard].step if unit.updates else 0.0
        return self.pass_seconds(unit.direction, unit.shard) + step

    @cached_property
    def longest_seconds(self) -> float:
        """Seconds of its longest unit."""
        ends = Direction.UPDATE if self.clipped else Direction.BACKWARD
        return max(
            self.pass_seconds(way, part.index) + (part.step if way is ends else 0.0)
            for part in self.shards
            for way in self.directions
        )

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of computing per minibatch, in the mean over the task."""
        share, forwards = self.often(Direction.UPDATE), 1 + self.often(Direction.EVALUATE)
        back = [self.backward_seconds(part.index) + part.step * share for part in self.shards]
        return math.fsum([*(part.forward * forwards for part in self.shards), *back])

    @property
    def seconds(self) -> float:
        """Seconds of computing of the whole task."""
        return self.steps * self.step_seconds

    @cached_property
    def device_bytes(self) -> int:
        """The smallest budget of a device that can run the task."""
        units = [(way, shard.index) for shard in self.shards for way in self.directions]
        if self.resident:
            extra = max(self.extra_bytes(*unit) for unit in units)
            return sum(self.held_bytes(Direction.FORWARD, shard.index) for shard in self.shards) + extra
        return max(self._alone(*unit) for unit in units)

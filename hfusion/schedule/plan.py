"""Plans: many tasks, each cut into shards, on devices with budgets, and the needs and costs of each unit.

A spilled task keeps its state in host memory: before a unit (one phase of one shard) its needs are loaded, afterwards
they are evicted, and the backward recomputes the shard from the values at its input cut
(Hydra, arXiv:2110.08633; recomputation: Chen et al., arXiv:1604.06174). A resident task is one shard, which stays on
its device. As a compromise, a spilled task may keep its last shard on the device and spill only the others. Bytes are
whole numbers, times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from hfusion.core.errors import PlanError
from hfusion.core.text import aligned, folded, html_table, readable
from hfusion.schedule.actions import Act, Action, Phase, Shard, Unit, estimate
from hfusion.schedule.lower import host_bytes, levels, lower, need

if TYPE_CHECKING:
    import networkx

__all__ = ["Phase", "Plan", "Shard", "TaskPlan", "Unit"]

# The phase of the unit that an act belongs to. In a clipped task, a STEP is a separate unit of Phase.UPDATE.
PHASES = {
    Act.FORWARD: Phase.FORWARD,
    Act.RECOMPUTE: Phase.BACKWARD,
    Act.BACKWARD: Phase.BACKWARD,
    Act.STEP: Phase.BACKWARD,
    Act.EVALUATE: Phase.EVALUATE,
}


class UnitActions(NamedTuple):
    """The actions of a device for a unit: load, compute, evict.

    Args:
        load: loads the shard; None if it is pinned, or loaded by the previous unit.
        waits: shards whose evictions must end before the load.
        other_peak: peak bytes on the device in addition to the loaded shard, until it is evicted.
        computes: the actions that compute.
        takes: bytes that are allocated when it begins to compute.
        extra: peak bytes of the unit in addition to all loaded shards.
        evict: evicts the shard.
        evicts_shard: whether the shard is evicted after this unit.
    """

    load: Action | None
    waits: frozenset[int]
    other_peak: int
    computes: tuple[Action, ...]
    takes: int
    extra: int
    evict: Action
    evicts_shard: bool


def split(actions: Sequence[Action], pinned: frozenset[int], *, clip: bool) -> dict[tuple[Phase, int], UnitActions]:
    """Group a list of actions into units, by phase and shard."""
    # The indices of the computing actions of each unit.
    runs: dict[tuple[Phase, int], list[int]] = {}
    for index, action in enumerate(actions):
        if action.act.lane == "compute":
            # A save belongs to the unit before it.
            if action.act is not Act.SAVE:
                phase = Phase.UPDATE if clip and action.act is Act.STEP else PHASES[action.act]
            runs.setdefault((phase, action.shard), []).append(index)
    units, used_loads = {}, set()
    acts = [(action.act, action.shard) for action in actions]
    on_device = levels(actions)
    next_starts = [*(computes[0] for computes in runs.values()), len(actions)][1:]
    for (phase, shard), computes, next_start in zip(runs, runs.values(), next_starts, strict=True):
        start = max(index for index in range(computes[0]) if acts[index] == (Act.LOAD, shard))
        end = next(index for index in range(computes[-1], len(actions)) if acts[index] == (Act.EVICT, shard))
        load = actions[start]
        run = tuple(actions[index] for index in computes)
        takes = sum(action.takes for action in run)
        units[phase, shard] = UnitActions(
            load if start not in used_loads and shard not in pinned else None,
            frozenset(~predecessor if predecessor < 0 else actions[predecessor].shard for predecessor in load.after),
            max(on_device[start:end]) - load.takes,
            run,
            takes,
            max(takes, sum(action.frees for action in run)),
            actions[end],
            end < next_start and shard not in pinned,
        )
        used_loads.add(start)
    return units


@dataclass(frozen=True)
class TaskPlan:
    """The plan of one task: its shards in graph order, for ``steps`` minibatches of ``width`` members.

    Args:
        resident: its only shard stays on the device while the task does, also while other tasks run there. Otherwise
            shards are loaded and evicted one by one.
        epoch: minibatches of an epoch, of which ``steps`` is a multiple; None: all are one epoch.
        accumulate: minibatches whose gradients are summed before the optimizer steps. The last group of an
            epoch may be shorter.
        clipped: the optimizer steps only when the gradients of all shards are there, since it scales them by
            their global norm. The steps are then units of their own.
        evaluated: minibatches that are evaluated after every epoch.
        growth: bytes of an evaluated minibatch's values over those of a trained one; at least 1.
        keeps_last_shard: the last shard of a spilled task, once loaded, stays on the device while the task does.
        save_every: minibatches from one save of the task to the next; it is saved at its end, too. None: never.

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
    growth: float = 1.0
    keeps_last_shard: bool = False
    save_every: int | None = None

    def __post_init__(self) -> None:
        if not self.name or any(character.isspace() for character in self.name):
            raise PlanError(f"task {self.name!r}: a name is one word without spaces")
        if not self.shards or min(self.steps, self.width, self.accumulate) < 1:
            counts = f"{len(self.shards)} shards, {self.steps} steps, width {self.width}, accumulate {self.accumulate}"
            raise PlanError(f"task {self.name!r} has {counts}: each must be at least 1")
        if self.epoch is not None and (self.epoch < 1 or self.steps % self.epoch):
            counts = f"{self.steps} steps in epochs of {self.epoch}"
            raise PlanError(f"task {self.name!r} has {counts}: give steps as a whole number of epochs of at least 1")
        if not 1 <= self.growth < math.inf:
            raise PlanError(f"task {self.name!r}: growth is {self.growth}: give a number of at least 1")
        if self.save_every is not None and self.save_every < 1:
            raise PlanError(
                f"task {self.name!r} is saved every {self.save_every} minibatches: give at least 1, or None"
            )
        if self.resident and len(self.shards) > 1:
            raise PlanError(
                f"task {self.name!r} is resident in {len(self.shards)} shards. Give a resident task one shard, or let "
                "it be spilled."
            )
        for position, shard in enumerate(self.shards):
            if shard.index != position:
                raise PlanError(f"task {self.name!r}: shard {position} carries the index {shard.index}")
            if position and self.shards[position - 1].last != shard.first:
                gap = f"shard {position} begins at node {shard.first}"
                raise PlanError(f"task {self.name!r}: {gap}, the one before ends at {self.shards[position - 1].last}")

    def named(self, name: str) -> TaskPlan:
        """Return this plan with another name. Cached properties are copied."""
        plan = replace(self, name=name)
        vars(plan).update({key: value for key, value in vars(self).items() if key != "name"})
        return plan

    @cached_property
    def _epoch(self) -> int:
        """Minibatches of an epoch."""
        return self.steps if self.epoch is None else self.epoch

    @cached_property
    def _group_units(self) -> int:
        """Units of a full accumulation group, including optimizer steps that are separate units."""
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
        """Number of passes over its minibatches."""
        return self.steps // self._epoch

    @cached_property
    def units(self) -> int:
        """Number of units of the whole task."""
        return self.epochs * self._epoch_units

    @cached_property
    def pinned(self) -> frozenset[int]:
        """The shards that stay on the device while the task does: the last one, or none."""
        return frozenset({len(self.shards) - 1} if self.resident or self.keeps_last_shard else ())

    @cached_property
    def training(self) -> tuple[Action, ...]:
        """Actions of a minibatch with an optimizer step and a save. Other minibatches leave out STEP and SAVE."""
        return self._lowered(evaluate=False)

    @cached_property
    def evaluation(self) -> tuple[Action, ...]:
        """The actions of a minibatch that is evaluated."""
        return self._lowered(evaluate=True)

    def _lowered(self, *, evaluate: bool) -> tuple[Action, ...]:
        return lower(
            self.shards,
            keeps_last=bool(self.pinned),
            accumulate=self.accumulate > 1,
            clip=self.clipped,
            evaluate=evaluate,
            growth=self.growth,
            save=self.save_every is not None,
        )

    @cached_property
    def pins(self) -> dict[int, Action]:
        """Loads of the pinned shards."""
        loads = [action for action in self.training if action.act is Act.LOAD]
        return {action.shard: action for action in loads if action.shard in self.pinned}

    def actions_of(self, unit: Unit) -> UnitActions:
        """Return the actions of a unit, with STEP and SAVE if they are due."""
        key = unit.phase, unit.shard, unit.updates, self.saves(unit)
        unit_actions = self._actions_of.get(key)
        if unit_actions is None:
            unit_actions = self.unit_actions[unit.phase, unit.shard]
            out = {act for act, done in ((Act.STEP, unit.updates), (Act.SAVE, key[-1])) if not done}
            computes = tuple(action for action in unit_actions.computes if action.act not in out)
            unit_actions = self._actions_of[key] = unit_actions._replace(computes=computes)
        return unit_actions

    @cached_property
    def unit_actions(self) -> dict[tuple[Phase, int], UnitActions]:
        lists = (self.training, self.evaluation)
        return {key: unit for actions in lists for key, unit in split(actions, self.pinned, clip=self.clipped).items()}

    @cached_property
    def _actions_of(self) -> dict[tuple[Phase, int, bool, bool], UnitActions]:
        """Cache of `actions_of`."""
        return {}

    @cached_property
    def update_count(self) -> int:
        """Number of optimizer steps of each shard in the whole task."""
        return self.epochs * math.ceil(self._epoch / self.accumulate)

    def unit(self, number: int) -> Unit:
        """Return the unit with index ``number``.

        Per minibatch the forwards ascending, then the backwards descending; after the last minibatch of a
        group, if the task is clipped, the updates ascending; after an epoch its evaluation, shards ascending.
        """
        count = len(self.shards)
        epoch, rest = divmod(number, self._epoch_units)
        if rest >= self._trained_units:
            index, position = divmod(rest - self._trained_units, count)
            return Unit(self.name, epoch * self.evaluated + index, Phase.EVALUATE, position, False)
        group, rest = divmod(rest, self._group_units)
        index, position = divmod(rest, 2 * count)
        size = min(self.accumulate, self._epoch - group * self.accumulate)
        first = epoch * self._epoch + group * self.accumulate
        if index == size:
            return Unit(self.name, first + size - 1, Phase.UPDATE, position, True)
        if position < count:
            return Unit(self.name, first + index, Phase.FORWARD, position, False)
        updates = index == size - 1 and not self.clipped
        return Unit(self.name, first + index, Phase.BACKWARD, 2 * count - 1 - position, updates)

    def closes(self, step: int) -> bool:
        """Return whether the optimizer steps after this minibatch, the last of its group or epoch."""
        ended = step % self._epoch + 1
        return ended == self._epoch or ended % self.accumulate == 0

    def trained(self, unit: Unit) -> bool:
        """Return whether a unit completes the training of a minibatch, including its optimizer step."""
        if self.clipped and self.closes(unit.step):
            return unit.phase is Phase.UPDATE and unit.shard == len(self.shards) - 1
        return unit.phase is Phase.BACKWARD and unit.shard == 0

    def ended(self, unit: Unit) -> int | None:
        """Return the number of minibatches that have ended with a unit: updated, and evaluated at the end of an epoch.

        None if no minibatch ends with this unit.
        """
        if unit.phase is Phase.EVALUATE:
            epoch, remainder = divmod(unit.step + 1, self.evaluated)
            return None if remainder or unit.shard != len(self.shards) - 1 else epoch * self._epoch
        if not self.closes(unit.step) or not self.trained(unit):
            return None
        steps = unit.step + 1
        return None if self.evaluated and not steps % self._epoch else steps

    def saves(self, unit: Unit) -> bool:
        """Return whether the task is saved after a unit."""
        steps = None if self.save_every is None else self.ended(unit)
        if steps is None or self.save_every is None:
            return False
        epoch, rest = divmod(steps - 1, self._epoch)
        before = epoch * self._epoch + rest // self.accumulate * self.accumulate
        return steps == self.steps or steps // self.save_every > before // self.save_every

    def unit_index_after(self, steps: int) -> int:
        """Return the index of the unit that follows ``steps`` minibatches, as counted by `ended`."""
        epoch, rest = divmod(steps, self._epoch)
        return epoch * self._epoch_units + rest // self.accumulate * self._group_units

    def must_follow(self, after: Unit) -> bool:
        """Return whether ``after`` must follow the unit before it immediately: the last shard's backward must."""
        return after.phase is Phase.BACKWARD and after.shard == len(self.shards) - 1

    def host_bytes(self, shard: int) -> int:
        """Return the bytes of a shard on the host."""
        return host_bytes(self.shards[shard], carried=self.carried)

    @property
    def carried(self) -> bool:
        """True if gradients outlive their backward unit, and so move to and from the host."""
        return self.accumulate > 1 or self.clipped

    @property
    def moved_bytes(self) -> tuple[float, float]:
        """Mean bytes per minibatch that units copy to the device and back."""
        unit_counts = [(count, self.actions_of(Unit(self.name, 0, *sort))) for sort, count in self.counts.items()]
        loaded = sum(count * unit.load.moves for count, unit in unit_counts if unit.load is not None)
        evicted = sum(count * unit.evict.moves for count, unit in unit_counts if unit.evicts_shard)
        return loaded / self.steps, evicted / self.steps

    def unit_seconds(self, unit: Unit) -> float:
        """Return the seconds that a unit computes."""
        return sum(action.seconds for action in self.actions_of(unit).computes)

    @property
    def counts(self) -> dict[tuple[Phase, int, bool], int]:
        """The number of units by phase, shard, and whether they end with the optimizer step."""
        updates = 0 if self.clipped else self.update_count
        counts = {
            (Phase.FORWARD, False): self.steps,
            (Phase.BACKWARD, True): updates,
            (Phase.BACKWARD, False): self.steps - updates,
            (Phase.UPDATE, True): self.update_count - updates,
            (Phase.EVALUATE, False): self.epochs * self.evaluated,
        }
        shard_counts: dict[tuple[Phase, int, bool], int] = {}
        for (phase, steps), count in counts.items():
            shard_counts |= {(phase, part.index, steps): count for part in self.shards if count}
        return shard_counts

    @cached_property
    def seconds(self) -> float:
        """Seconds of computing of the whole task."""
        return math.fsum(count * self.unit_seconds(Unit(self.name, 0, *sort)) for sort, count in self.counts.items())

    @property
    def step_seconds(self) -> float:
        """Seconds of computing per minibatch, in the mean over the task."""
        return self.seconds / self.steps

    @cached_property
    def device_bytes(self) -> int:
        """The smallest budget of a device that can run the task."""
        return max(need(self.training), need(self.evaluation) if self.evaluated else 0)


# Tasks on devices.

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


def _row(task: TaskPlan, largest: int) -> tuple[str, ...]:
    # What the task keeps on its device.
    stays = "all" if task.resident else readable(sum(map(task.host_bytes, task.pinned))) if task.pinned else "-"
    return (
        task.name,
        "resident" if task.resident else "spilled",
        str(task.width),
        str(len(task.shards)),
        str(task.steps),
        f"{task.step_seconds:.4g}",
        stays,
        readable(task.device_bytes),
        f"{task.device_bytes / largest:.0%}" if largest else "-",
        readable(sum(task.moved_bytes)),
    )

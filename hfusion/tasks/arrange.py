"""From tasks and a machine to arrays and plans: what is fused, resident or spilled, in how many shards."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeAlias

import torch
from torch import nn

from hfusion.array.array_editing import share_programs
from hfusion.array.fuse import fuse
from hfusion.array.member_views import check_together
from hfusion.array.module import FusedModule
from hfusion.array.per_model import PerModel
from hfusion.capture.attribute_fingerprint import fingerprint
from hfusion.core.errors import ForwardsDiffer, PlanError
from hfusion.core.program import Program
from hfusion.core.python_values import IdentityRef
from hfusion.device.backend import random_states_kept
from hfusion.device.calibrate import Rates
from hfusion.device.machine import Machine
from hfusion.optim.base import FusedOptimizer
from hfusion.passes.cost.cost import symbol_sizes
from hfusion.passes.partition.cut_shards import Sharding, growth, sharding, shards_at
from hfusion.runtime.recipe import Recipe
from hfusion.schedule.plan import Plan, TaskPlan
from hfusion.tasks.reading import generators_kept, length, reading
from hfusion.tasks.sharing import check_loaders, check_tensors
from hfusion.tasks.source import Minibatch, Shapes, Stream, evaluation_parts, largest, samples, training_programs
from hfusion.tasks.task import Task, optimizer_of, shapes

Turn: TypeAlias = AbstractContextManager[Any] | None


@dataclass(frozen=True, eq=False)
class First:
    """The minibatches of a task's loaders that memory is planned for: the first, or the largest of a list.

    ``shapes``: of the largest inputs in training, and in training or evaluation.
    """

    trained: Any
    evaluated: Any
    shapes: tuple[Shapes, Shapes]


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Members of a task that are trained as one array by ``plan``; ``first``: the minibatches to capture with."""

    task: Task
    members: tuple[int, ...]
    array: FusedModule
    optimizer: FusedOptimizer
    first: First
    plan: TaskPlan

    def minibatch(self) -> Minibatch:
        """Return the minibatch of the training loader that memory is planned for."""
        return Minibatch.of(self.task, self.first.trained, self.members)

    def trained(
        self, plan: TaskPlan, loss: PerModel, devices: Sequence[torch.device], turn: Turn = None
    ) -> tuple[Stream, Recipe]:
        """Return the training minibatches, cut into the shards of ``plan``, and the recipe of the planned one."""
        programs = training_programs(self.task.name, self.array, plan.shards)
        planned = self.first.shapes[0]
        stream = Stream(self.task, self.task.loader, self.members, loss, programs, planned, devices, turn)
        return stream, stream.prepare(self.minibatch())

    def evaluated(
        self,
        loader: Iterable[Any],
        loss: PerModel,
        devices: Sequence[torch.device],
        names: Mapping[str, str],
        held: Sequence[frozenset[str]],
        turn: Turn = None,
    ) -> tuple[Stream, Recipe]:
        """Return the same for evaluation. A shard uses only the tensors of its set in ``held``, see `match_cuts`."""
        programs = partial(evaluation_parts, self.array, names, held)
        stream = Stream(self.task, loader, self.members, loss, programs, self.first.shapes[1], devices, turn)
        return stream, stream.prepare(Minibatch.of(self.task, self.first.evaluated, self.members))


def arrange(tasks: Sequence[Task], machine: Machine, *, keep: bool = True) -> tuple[list[Arrangement], Plan]:
    """Fuse tasks as wide as they fit, and cut those that do not fit the largest device into shards.

    ``keep``: a spilled task may keep its last shard on the device, see `choose_cuts`.

    Raises:
        PlanError: names repeat, a task does not fit even in shards, or tensors or loaders cannot be shared.
        FusionError: a model cannot be captured.
    """
    check_tensors(tasks)
    rates = machine.calibrate()
    room = room_of(machine, rates, keep=keep, at_once=len(tasks))
    arrangements = [arrangement for task in tasks for arrangement in arrays_of(task, room)]
    check_loaders(
        [
            (arrangement.plan.name, (arrangement.task.loader, arrangement.task.eval_loader))
            for arrangement in arrangements
        ]
    )
    return arrangements, _plan_of(arrangements, machine, rates, room)


def _plan_of(arrangements: Sequence[Arrangement], machine: Machine, rates: Mapping[str, Rates], room: Room) -> Plan:
    load, evict = (min(getattr(rate, name) for rate in rates.values()) for name in ("load", "evict"))
    budgets = {device.name: device.memory for device in machine.devices}
    plans = tuple(arrangement.plan for arrangement in arrangements)
    return Plan(plans, budgets, load, evict, room.rates.action_seconds)


# The fields of a plan that determine how its tasks are trained, but not where.
_SAME = ("name", "steps", "width", "epoch", "accumulate", "clipped", "evaluated", "growth")


def checked_plan(plan: Plan, expected: Plan) -> Plan:
    """``plan``, if it is one of the same tasks as ``expected``, for devices that have no less."""
    if not isinstance(plan, Plan):
        raise PlanError(f"plan must be what hf.plan returned, got {type(plan).__name__}. Leave it out to plan anew.")
    for planned_task, expected_task in zip(plan.tasks, expected.tasks, strict=False):
        for field in _SAME:
            if getattr(planned_task, field) != getattr(expected_task, field):
                raise PlanError(
                    f"the plan was made for task {planned_task.name!r} with {field} {getattr(planned_task, field)!r}, "
                    f"and task {expected_task.name!r} of this call has {getattr(expected_task, field)!r}: make "
                    "a new plan"
                )
    if len(plan.tasks) != len(expected.tasks) or set(plan.devices) != set(expected.devices):
        raise PlanError("the plan given has other tasks or devices than those of this call: make a new plan")
    for name, budget in plan.devices.items():
        if budget > expected.devices[name]:
            raise PlanError(
                f"the plan given takes {budget:,} bytes of device {name!r}, which has {expected.devices[name]:,}: make "
                "a new plan"
            )
    return plan


def arrange_one(
    task: Task, members: Sequence[int], name: str, machine: Machine, planned: Arrangement | None = None
) -> tuple[list[Arrangement], Plan]:
    """Return the plan of one array of a task with known members. Raises as `arrange`.

    ``planned``: the same array, planned for another device.
    """
    rates = machine.calibrate()
    room = room_of(machine, rates, keep=True)
    if planned is None:
        arrangement = _arranged(task, array_of(task, members), members, first_minibatches(task), room, name)
    else:
        arrangement = _arranged(task, planned.array, members, planned.first, room, name, planned.optimizer)
    return [arrangement], _plan_of([arrangement], machine, rates, room)


def array_of(task: Task, members: Sequence[int]) -> FusedModule:
    """Return the array of a task, or fuse those of its models. Raises FusionError."""
    if isinstance(task.models, FusedModule):
        check_together(task.models, "hf.train")
        return task.models
    models = [task.models] if isinstance(task.models, nn.Module) else task.models
    return fuse([models[index] for index in members])


def room_of(machine: Machine, rates: Mapping[str, Rates], *, keep: bool, at_once: int = 1) -> Room:
    """Return the largest device, with its rates while ``at_once`` tasks are trained at the same time."""
    largest = max(machine.devices, key=lambda device: device.memory)
    beside = sum(device.physical == largest.physical for device in machine.devices)
    shared = rates[largest.name].shared(min(beside, at_once), min(len(machine.devices), at_once))
    return Room(largest.physical, largest.memory, shared, keep)


def arrays_of(task: Task, room: Room) -> list[Arrangement]:
    """Return the arrays of one task: several if shapes differ, or if all members together do not fit."""
    try:
        return _plan_arrays(task, room, first_minibatches(task))
    except Exception as error:
        error.add_note(f"in the task {task.name!r}")
        raise


def _plan_arrays(task: Task, room: Room, first: First) -> list[Arrangement]:
    if isinstance(task.models, FusedModule):
        members = range(task.members)
        return [_arranged(task, array_of(task, members), members, first, room, task.name)]
    models = [task.models] if isinstance(task.models, nn.Module) else list(task.models)
    groups = deque(part for group in shapes(models) for part in _alike(task, models, group, first, room))
    arrays, count = [], len(groups)
    for number in range(count):
        name = task.name if count == 1 else f"{task.name}.{number}"
        arrays += _widths(task, *groups.popleft(), first, room, name)
    return arrays


def _alike(
    task: Task, models: Sequence[nn.Module], group: Sequence[int], first: First, room: Room
) -> Iterator[tuple[Sequence[int], FusedModule | None]]:
    """Yield groups of models whose forwards are equal in training and evaluation, with their array if it is built.

    Models that read the same numbers are equal; the forwards of others are compared.
    """
    if len({fingerprint(models[index]) for index in group}) == 1:
        yield group, None
        return
    whole = array_of(task, group)
    _plan_for(whole, room)
    try:
        whole.compiled(Minibatch.of(task, first.trained, group).arguments_for(whole))
        if task.eval_loader is not None:
            with whole.evaluating():
                whole.compiled(Minibatch.of(task, first.evaluated, group).arguments_for(whole))
    except ForwardsDiffer as error:
        for part in error.groups:
            yield from _alike(task, models, [group[member] for member in part], first, room)
    else:
        yield group, whole


def _widths(
    task: Task, group: Sequence[int], whole: FusedModule | None, first: First, room: Room, name: str
) -> list[Arrangement]:
    """Return the arrays of models with equal forwards, at the width with the least estimated time."""
    whole = whole or array_of(task, group)
    optimizer = optimizer_of(task, whole, group)
    width = _width(task, whole, optimizer, group, first, room)
    if width == len(group):
        return [_arranged(task, whole, group, first, room, name, optimizer)]
    del whole, optimizer
    return [
        _arranged(task, array_of(task, part), part, first, room, f"{name}.{number}")
        for number, part in enumerate(batched_evenly(group, width))
    ]


def batched_evenly(items: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """Split ``items`` into consecutive runs of at most ``width`` items, with lengths as equal as possible.

    >>> batched_evenly(range(5), 3)
    [(0, 1, 2), (3, 4)]
    """
    count = math.ceil(len(items) / width)
    small, large = divmod(len(items), count)
    ends = [small * (index + 1) + min(index + 1, large) for index in range(count)]
    return [tuple(items[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def _width(
    task: Task, whole: FusedModule, optimizer: FusedOptimizer, group: Sequence[int], first: First, room: Room
) -> int:
    """Return the number of members to fuse: the fastest of B, B/2, B/4, ...; the widest if equal.

    A resident array costs its computing; a spilled one its computing or its transfers, whichever take longer.
    """
    minibatch = Minibatch.of(task, first.trained, group)
    _plan_for(whole, room)
    program = whole.compiled(minibatch.arguments_for(whole)).program
    best: tuple[float, int] | None = None
    failure: PlanError | None = None
    width = len(group)
    while width:
        try:
            plan = array_plan(task, program, first.shapes, optimizer.state_stacks, room, "width", width)
        except PlanError as error:
            failure = failure or error
        else:
            seconds = math.ceil(len(group) / width) * minibatch_seconds(plan, room.rates)
            if best is None or seconds < 0.99 * best[0]:
                best = (seconds, width)
        width = 0 if width == 1 else math.ceil(width / 2)
    if best is None:
        assert failure is not None
        raise failure
    return best[1]


def _arranged(
    task: Task,
    array: FusedModule,
    members: Sequence[int],
    first: First,
    room: Room,
    name: str,
    optimizer: FusedOptimizer | None = None,
) -> Arrangement:
    minibatch = Minibatch.of(task, first.trained, members)
    _plan_for(array, room)
    program = array.compiled(minibatch.arguments_for(array)).program
    optimizer = optimizer or optimizer_of(task, array, members)
    plan = array_plan(task, program, first.shapes, optimizer.state_stacks, room, name, len(members))
    return Arrangement(task, tuple(members), array, optimizer, first, plan)


def _plan_for(array: FusedModule, room: Room) -> None:
    array.planned_for(room.device)
    share_programs(array)


def first_minibatches(task: Task) -> First:
    """Read minibatches to plan with from a task's loaders. Restore the random states of torch and the loaders."""
    with random_states_kept(), generators_kept(task.loader), generators_kept(task.eval_loader):
        trained, shapes = _planning_minibatch(task, "loader", task.loader)
        if task.eval_loader is None:
            return First(trained, None, (shapes, shapes))
        evaluated, others = _planning_minibatch(task, "eval_loader", task.eval_loader)
        return First(trained, evaluated, (shapes, largest(shapes, others)))


def _planning_minibatch(task: Task, role: str, loader: Iterable[Any]) -> tuple[Any, Shapes]:
    """Return the minibatch of a loader that memory is planned for: the largest of a list, otherwise the first.

    The shapes are those of its inputs, or the largest that any minibatch of the list has.
    """

    def shapes_of(item: Any) -> Shapes:
        return Minibatch.of(task, item, range(task.members)).shapes

    with reading(loader) as items:
        if items is loader:
            raise PlanError(
                f"task {task.name!r}: the {role} of class {type(loader).__name__} can be read only once. Give one that "
                "can be read again for every epoch, such as a DataLoader or a list."
            )
        if isinstance(loader, list | tuple) and loader:
            shapes = {id(item): shapes_of(item) for item in loader}
            item = max(items, key=lambda item: samples(shapes[id(item)]))
            return item, reduce(largest, shapes.values(), shapes[id(item)])
        for first_item in items:
            return first_item, shapes_of(first_item)
    raise PlanError(
        f"task {task.name!r}: the {role} gives no minibatch, but its length is {length(loader)}: give one whose length "
        "is the number of its minibatches"
    )


# Plan one array: resident or spilled, in how many shards; many tasks of one shape share a plan.

# Number of plans that are cached for equal tasks.
MAX_PLANS = 256
_plans: dict[Any, TaskPlan] = {}


@dataclass(frozen=True)
class Room:
    """The device that arrays are planned for. ``keep``: a spilled array may keep its last shard on the device."""

    device: torch.device
    budget: int
    rates: Rates
    keep: bool


def array_plan(
    task: Task,
    program: Program,
    sizes: tuple[Shapes, Shapes],
    stacks: int,
    room: Room,
    name: str,
    width: int,
) -> TaskPlan:
    """Return the plan of a program for ``width`` members, from a cache if an equal one was planned before.

    Args:
        sizes: the largest inputs in training and in evaluation, see `Minibatch.shapes`.
        stacks: tensors of optimizer state per parameter, see `FusedOptimizer.state_stacks`.
    """
    numbers = task.steps, task.epoch, task.accumulate, task.evaluated, task.clip_norm is not None
    key = IdentityRef(program), width, sizes, stacks, room, numbers
    if key not in _plans:
        sized = program if program.members == width else replace(program, members=width)
        plan = _new_plan(task, sized, sizes, stacks, room, name, width)
        if len(_plans) == MAX_PLANS:
            _plans.clear()
        # Compute the cached property now, so that renamed copies share it.
        assert plan.seconds >= 0
        _plans[key] = plan
    return _plans[key].named(name)


def _new_plan(
    task: Task,
    program: Program,
    sizes: tuple[Shapes, Shapes],
    stacks: int,
    room: Room,
    name: str,
    width: int,
) -> TaskPlan:
    """Return a resident plan if it fits the budget, otherwise a spilled one."""
    trained, evaluated = (symbol_sizes(program, shapes) for shapes in sizes)
    larger = growth(program, trained, evaluated, room.rates)

    def planned(cut: Sharding, *, resident: bool) -> TaskPlan:
        return TaskPlan(
            name,
            cut.shards,
            task.steps,
            resident,
            width,
            task.epoch,
            task.accumulate,
            clipped=task.clip_norm is not None,
            evaluated=task.evaluated,
            growth=larger,
            keeps_last_shard=cut.keeps_last,
        )

    whole = Sharding(shards_at(program, (), trained, room.rates, stacks), keeps_last=False)
    resident = planned(whole, resident=True)
    if resident.device_bytes <= room.budget:
        return resident
    cut = sharding(program, trained, room.budget, room.rates, stacks, carried=resident.carried, keep=room.keep)
    spilled = planned(cut, resident=False)
    if larger > 1 and spilled.device_bytes > room.budget:
        raise PlanError(
            f"task {task.name!r}: to evaluate a minibatch of {samples(sizes[1])} samples needs "
            f"{spilled.device_bytes:,} bytes in {len(cut.shards)} shards, and the largest device has {room.budget:,}; "
            f"those of {samples(sizes[0])} samples can be trained there: give an eval_loader with smaller minibatches, "
            "or more memory"
        )
    return spilled


def minibatch_seconds(plan: TaskPlan, rates: Rates) -> float:
    """Return the estimated seconds of a minibatch: computing or, if spilled and slower, transfers."""
    if plan.resident:
        return plan.step_seconds
    moved_in, moved_out = plan.moved_bytes
    return max(plan.step_seconds, moved_in / rates.load, moved_out / rates.evict)

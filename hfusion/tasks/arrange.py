"""From tasks and a machine to arrays and plans: what is fused, resident or spilled, in how many shards."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import torch

from hfusion.array.array_editing import share_programs
from hfusion.array.fuse import fuse
from hfusion.array.member_views import check_together
from hfusion.array.module import FusedModule
from hfusion.capture.attribute_fingerprint import fingerprint
from hfusion.core.errors import ForwardsDiffer, HFusionError, PlanError, noting
from hfusion.core.program import Program
from hfusion.core.python_values import IdentityRef
from hfusion.device.backend import random_states_kept
from hfusion.device.calibrate import Rates
from hfusion.device.machine import Machine
from hfusion.optim.base import FusedOptimizer
from hfusion.passes.cost.cost import symbol_sizes
from hfusion.passes.partition.cut_shards import growth, sharding, shards_at
from hfusion.schedule.plan import Plan, TaskPlan
from hfusion.schedule.timeline import Timeline
from hfusion.tasks.reading import generators_kept, length, reading
from hfusion.tasks.source import Minibatch, Shapes, largest, samples
from hfusion.tasks.task import Task, check_loaders, check_tensors, listed_models, optimizer_of, shapes
from hfusion.tasks.training_report import Report, TrainError


@dataclass(frozen=True)
class Room:
    """The device that arrays are planned for. ``keep``: a spilled array may keep its last shard on the device."""

    device: torch.device
    budget: int
    rates: Rates
    keep: bool

    @staticmethod
    def of(machine: Machine, rates: Mapping[str, Rates], *, keep: bool, at_once: int = 1) -> Room:
        """Return the largest device, with its rates while ``at_once`` tasks are trained at the same time."""
        largest = max(machine.devices, key=lambda device: device.memory)
        beside = sum(device.physical == largest.physical for device in machine.devices)
        shared = rates[largest.name].shared(min(beside, at_once), min(len(machine.devices), at_once))
        return Room(largest.physical, largest.memory, shared, keep)


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


def arrange(tasks: Sequence[Task], machine: Machine, *, keep: bool = True) -> tuple[list[Arrangement], Plan]:
    """Fuse tasks as wide as they fit, and cut those that do not fit the largest device into shards.

    ``keep``: a spilled task may keep its last shard on the device, see `choose_cuts`.

    Raises:
        PlanError: names repeat, a task does not fit even in shards, or tensors or loaders cannot be shared.
        FusionError: a model cannot be captured.
        TrainError: a loader has failed.
    """
    check_tensors(tasks)
    rates = machine.calibrate()
    room = Room.of(machine, rates, keep=keep, at_once=len(tasks))
    arrangements: list[Arrangement] = []
    for task in tasks:
        try:
            arrangements += arrays_of(task, room)
        except HFusionError:
            raise
        except Exception as error:
            report = Report({}, _plan_of([], machine, rates, room), Timeline((), (), 0.0), {})
            raise TrainError.of([task.name], error, report) from error
    check_loaders([(array.plan.name, array.task) for array in arrangements])
    return arrangements, _plan_of(arrangements, machine, rates, room)


def arrange_one(
    task: Task, members: Sequence[int], name: str, machine: Machine, planned: Arrangement | None = None
) -> tuple[list[Arrangement], Plan]:
    """Return the plan of one array of a task with known members. Raises as `arrange`.

    ``planned``: the same array, planned for another device.
    """
    rates = machine.calibrate()
    room = Room.of(machine, rates, keep=True)
    first = first_minibatches(task) if planned is None else planned.first
    made = () if planned is None else (planned.array, planned.optimizer)
    arrangement = TaskPlanner(task, room, first).arranged(name, members, *made)
    return [arrangement], _plan_of([arrangement], machine, rates, room)


def _plan_of(arrangements: Sequence[Arrangement], machine: Machine, rates: Mapping[str, Rates], room: Room) -> Plan:
    load, evict = (min(getattr(rate, name) for rate in rates.values()) for name in ("load", "evict"))
    budgets = {device.name: device.memory for device in machine.devices}
    return Plan(tuple(array.plan for array in arrangements), budgets, load, evict, room.rates.action_seconds)


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


def array_of(task: Task, members: Sequence[int]) -> FusedModule:
    """Return the array of a task, or fuse those of its models. Raises FusionError."""
    if isinstance(task.models, FusedModule):
        check_together(task.models, "hf.train")
        return task.models
    models = listed_models(task)
    return fuse([models[index] for index in members])


def arrays_of(task: Task, room: Room) -> list[Arrangement]:
    """Return the arrays of one task: several if shapes differ, or if all members together do not fit."""
    with noting(f"in the task {task.name!r}"):
        planner = TaskPlanner(task, room, first_minibatches(task))
        if isinstance(task.models, FusedModule):
            return [planner.arranged(task.name, range(task.members))]
        return planner.arrays()


@dataclass(frozen=True, eq=False)
class TaskPlanner:
    """Divides a task into arrays and plans them for a device. ``first``: the minibatches to capture with."""

    task: Task
    room: Room
    first: First

    def arrays(self) -> list[Arrangement]:
        """Return the arrays of models that are not fused yet."""
        groups = deque(part for group in shapes(listed_models(self.task)) for part in self._alike(group))
        arrays, count = list[Arrangement](), len(groups)
        for number in range(count):
            name = self.task.name if count == 1 else f"{self.task.name}.{number}"
            # No reference to the array is kept here: it is freed before narrower ones are made.
            arrays += self._as_wide_as_fits(name, *groups.popleft())
        return arrays

    def arranged(
        self,
        name: str,
        members: Sequence[int],
        array: FusedModule | None = None,
        optimizer: FusedOptimizer | None = None,
    ) -> Arrangement:
        """Return the plan of one array of known members, made if there is none."""
        array = array or array_of(self.task, members)
        program = self._program(array, members)
        optimizer = optimizer or optimizer_of(self.task, array, members)
        plan = self._planned(program, optimizer, len(members)).named(name)
        return Arrangement(self.task, tuple(members), array, optimizer, self.first, plan)

    def _alike(self, group: Sequence[int]) -> Iterator[tuple[Sequence[int], FusedModule | None]]:
        """Yield groups of models whose forwards are equal in training and evaluation, with their array if it is built.

        Models that read the same numbers are equal; the forwards of others are compared.
        """
        task, models = self.task, listed_models(self.task)
        if len({fingerprint(models[index]) for index in group}) == 1:
            yield group, None
            return
        whole = array_of(task, group)
        try:
            self._program(whole, group)
            if task.eval_loader is not None:
                with whole.evaluating():
                    whole.compiled(Minibatch.of(task, self.first.evaluated, group).arguments_for(whole))
        except ForwardsDiffer as error:
            for part in error.groups:
                yield from self._alike([group[member] for member in part])
        else:
            yield group, whole

    def _as_wide_as_fits(self, name: str, group: Sequence[int], whole: FusedModule | None) -> list[Arrangement]:
        """Return the arrays of models with equal forwards, at the width with the least estimated time."""
        whole = whole or array_of(self.task, group)
        optimizer = optimizer_of(self.task, whole, group)
        width = self._width(whole, optimizer, group)
        if width == len(group):
            return [self.arranged(name, group, whole, optimizer)]
        del whole, optimizer
        # Consecutive runs of at most so many members, with lengths as equal as possible.
        parts = np.array_split(group, math.ceil(len(group) / width))
        return [self.arranged(f"{name}.{number}", part.tolist()) for number, part in enumerate(parts)]

    def _width(self, whole: FusedModule, optimizer: FusedOptimizer, group: Sequence[int]) -> int:
        """Return the number of members to fuse: the fastest of B, B/2, B/4, ...; the widest if equal.

        A resident array costs its computing; a spilled one its computing or its transfers, whichever take longer.
        """
        program, rates = self._program(whole, group), self.room.rates
        best: tuple[float, int] | None = None
        failure: PlanError | None = None
        width = len(group)
        while width:
            try:
                plan = self._planned(program, optimizer, width)
            except PlanError as error:
                failure = failure or error
            else:
                moved_in, moved_out = (0.0, 0.0) if plan.resident else plan.moved_bytes
                minibatch = max(plan.step_seconds, moved_in / rates.load, moved_out / rates.evict)
                seconds = math.ceil(len(group) / width) * minibatch
                if best is None or seconds < 0.99 * best[0]:
                    best = (seconds, width)
            width = 0 if width == 1 else math.ceil(width / 2)
        if best is None:
            assert failure is not None
            raise failure
        return best[1]

    def _program(self, array: FusedModule, members: Sequence[int]) -> Program:
        """Return the program of an array for the planned minibatch, lowered for the device of the plan."""
        array.planned_for(self.room.device)
        share_programs(array)
        return array.compiled(Minibatch.of(self.task, self.first.trained, members).arguments_for(array)).program

    def _planned(self, program: Program, optimizer: FusedOptimizer, width: int) -> TaskPlan:
        """Return the plan of a program for ``width`` members. Raises PlanError if it does not fit."""
        task, shapes = self.task, self.first.shapes
        numbers = task.steps, task.epoch, task.accumulate, task.evaluated, task.clip_norm is not None
        plan = _array_plan(IdentityRef(program), width, shapes, optimizer.state_stacks, self.room, numbers)
        if plan.growth > 1 and plan.device_bytes > self.room.budget:
            raise PlanError(
                f"task {task.name!r}: to evaluate a minibatch of {samples(shapes[1])} samples needs "
                f"{plan.device_bytes:,} bytes in {len(plan.shards)} shards, and the largest device has "
                f"{self.room.budget:,}; those of {samples(shapes[0])} samples can be trained there: give an "
                "eval_loader with smaller minibatches, or more memory"
            )
        return plan


@lru_cache(256)
def _array_plan(
    program_ref: IdentityRef,
    width: int,
    shapes: tuple[Shapes, Shapes],
    stacks: int,
    room: Room,
    numbers: tuple[int, int, int, int, bool],
) -> TaskPlan:
    """Return a resident plan if it fits the budget, otherwise a spilled one. Tasks of one shape share it.

    Args:
        shapes: of the largest inputs in training and in evaluation, see `Minibatch.shapes`.
        stacks: tensors of optimizer state per parameter, see `FusedOptimizer.state_stacks`.
        numbers: minibatches in all, of an epoch, of an optimizer step and of an evaluation, and whether it is clipped.
    """
    program: Program = program_ref.held
    program = program if program.members == width else replace(program, members=width)
    trained, evaluated = (symbol_sizes(program, largest_shapes) for largest_shapes in shapes)
    steps, epoch, accumulate, evaluations, clipped = numbers
    resident = TaskPlan(
        "array",
        shards_at(program, (), trained, room.rates, stacks),
        steps,
        resident=True,
        width=width,
        epoch=epoch,
        accumulate=accumulate,
        clipped=clipped,
        evaluated=evaluations,
        growth=growth(program, trained, evaluated, room.rates),
    )
    if resident.device_bytes <= room.budget:
        plan = resident
    else:
        cut = sharding(program, trained, room.budget, room.rates, stacks, carried=resident.carried, keep=room.keep)
        plan = replace(resident, shards=cut.shards, resident=False, keeps_last_shard=cut.keeps_last)
    # Compute the cached property now, so that renamed copies share it.
    assert plan.seconds >= 0
    return plan


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

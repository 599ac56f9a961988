"""Plan one array: resident or spilled, in how many shards; many tasks of one shape share a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from hfusion.core.errors import PlanError
from hfusion.core.program import Program
from hfusion.core.python_values import IdentityRef
from hfusion.device.calibrate import Rates
from hfusion.passes.cost.cost import symbol_sizes
from hfusion.passes.partition.cut_shards import Sharding, growth, sharding, shards_at
from hfusion.schedule.plan import TaskPlan
from hfusion.tasks.minibatch import Shapes, samples
from hfusion.tasks.task import Task

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

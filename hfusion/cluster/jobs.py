"""From tasks to the arrays that are sent to devices: planned here, by what each device said of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hfusion.array.fuse import fuse
from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors
from hfusion.cluster.device_kinds import DeviceKinds
from hfusion.cluster.executor import Executor
from hfusion.cluster.longest_first import Load
from hfusion.cluster.messages import DeviceInfo
from hfusion.cluster.node import ArrayJob
from hfusion.cluster.serialization import pack_with_keys
from hfusion.core.errors import PlanError
from hfusion.schedule.plan import Plan, Processes, TaskPlan
from hfusion.tasks.alike_tasks import AlikeTasks
from hfusion.tasks.arrange import Arrangement
from hfusion.tasks.array_plan import ArrayCost, Room
from hfusion.tasks.checkpoints import check_every, check_folder
from hfusion.tasks.sharing import check_loaders, check_tensors
from hfusion.tasks.task import Task


@dataclass(frozen=True)
class RunOptions:
    """Options that the arrays of a run share.

    Attributes:
        checkpoint: the folder of the run.
        every: the most minibatches that are lost.
        policy: the name of one.
        asks: somebody decides who stops.
    """

    checkpoint: Path | None
    every: int | None
    policy: str
    asks: bool = False


@dataclass(frozen=True, eq=False)
class PlacedArray:
    """An array: whose task and members, and its seconds on each kind of device.

    Attributes:
        sent: the task as it goes there.
        plan: as it is trained; None: the process plans.
        array: of this process, for the results; None: it is fused for them.
        cost: for estimates on devices that join.
    """

    task: Task
    members: tuple[int, ...]
    load: Load
    sent: Task
    options: RunOptions
    plan: TaskPlan | None = None
    array: FusedModule | None = None
    cost: ArrayCost | None = None

    def job(self, parts: SharedParts) -> ArrayJob:
        parcel, keys = pack_with_keys(f"the task {self.task.name!r}", self.sent, parts.keys)
        options = self.options
        return ArrayJob(
            self.load.name,
            self.members,
            parcel,
            {key: parts.kept[key] for key in keys},
            options.policy,
            options.checkpoint,
            options.every,
            self.plan,
            options.asks,
            bool(self.task.callbacks),
        )

    def trained_array(self) -> FusedModule:
        """Return the array of this process into which results are written."""
        if self.array is not None:
            return self.array
        models = self.task.models
        if isinstance(models, FusedModule):
            return models
        listed = [models] if isinstance(models, nn.Module) else models
        return fuse([listed[index] for index in self.members])


@dataclass(frozen=True, eq=False)
class ClusterArrays:
    """All arrays of a run; ``kinds``: of each device, the index of its seconds in the loads.

    ``rooms``: the kinds themselves, if devices may join.
    """

    tasks: tuple[Task, ...]
    arrays: tuple[PlacedArray, ...]
    kinds: tuple[int, ...]
    processes: Processes | None = None
    rooms: DeviceKinds | None = None

    def kind_of(self, device: DeviceInfo) -> tuple[int, list[float | None] | None]:
        """Return the kind of a device that joins, and if it is a new one the seconds of each array on it."""
        assert self.rooms is not None
        before, kind = len(self.rooms.rooms), self.rooms.kind(device)
        if kind < before:
            return kind, None
        room = self.rooms.rooms[kind]
        return kind, [None if one.cost is None else one.cost.seconds_on(room) for one in self.arrays]


def arranged(
    tasks: Sequence[Task], devices: Sequence[DeviceInfo], options: RunOptions, *, resume: bool
) -> ClusterArrays:
    """The arrays that the largest device would have, as `hfusion.train` on a machine of these devices.

    Raises:
        PlanError, FusionError: as `hfusion.plan`.
        CheckpointError: the folder cannot be made, or holds what is not to go on.
    """
    check_every(options.every)
    check_schedulers(tasks)
    rooms = DeviceKinds()
    kinds = tuple(map(rooms.kind, devices))
    check_tensors(tasks)
    most = max(devices, key=lambda device: device.budget)
    largest = Room(most.physical, most.budget, most.rates, keep=True)
    arrays: list[PlacedArray] = []
    alike = AlikeTasks(largest)
    for task in tasks:
        for members, cost in alike.arrays(task):
            load = Load(cost.name, tuple(map(cost.seconds_on, rooms.rooms)), task.name, task.steps)
            arrays.append(PlacedArray(task, members, load, seeded_task(sent_task(task, members)), options, cost=cost))
    check_loaders([(one.load.name, (one.task.loader, one.task.eval_loader)) for one in arrays])
    if options.checkpoint is not None:
        check_folder(options.checkpoint, [one.load.name for one in arrays], resume=resume)
    return ClusterArrays(tuple(tasks), tuple(arrays), kinds, rooms=rooms)


def planned(
    arrangements: Sequence[Arrangement], plan: Plan, devices: Sequence[DeviceInfo], options: RunOptions
) -> ClusterArrays:
    """The arrays of a plan of one machine, each to be trained as that says on the device of its process."""
    kinds = tuple(range(len(devices)))
    arrays = []
    for one, task_plan in zip(arrangements, plan.tasks, strict=True):
        seconds = tuple(task_plan.seconds if task_plan.device_bytes <= each.budget else None for each in devices)
        load = Load(task_plan.name, seconds, one.task.name, one.task.steps)
        sent = seeded_task(sent_task(one.task, one.members))
        arrays.append(PlacedArray(one.task, one.members, load, sent, options, task_plan, one.array))
    return ClusterArrays(
        tuple({id(one.task): one.task for one in arrangements}.values()), tuple(arrays), kinds, plan.processes
    )


def check_schedulers(tasks: Iterable[Task]) -> None:
    """Raise PlanError for a scheduler that drives an optimizer of this process."""
    for task in tasks:
        if isinstance(task.scheduler, lr_scheduler.LRScheduler):
            raise PlanError(
                f"task {task.name!r}: a scheduler that exists cannot go to another process; give a function that makes "
                "one from an optimizer"
            )


def sent_task(task: Task, members: Sequence[int]) -> Task:
    """The task with the models of one array, as it goes to another process."""
    models = task.models
    if not isinstance(models, nn.Module):
        own, absent = set(members), nn.Identity()
        models = [model if index in own else absent for index, model in enumerate(models)]
    return replace(task, models=models, callbacks=())


def seeded_task(task: Task) -> Task:
    """The task with the seed that a run on one machine would draw, which draws in the order of the arrays."""
    return replace(task, seed=int(torch.randint(1 << 62, (), device="cpu")) if task.seed is None else task.seed)


class SharedParts:
    """Objects that several arrays share: loaders, and frozen tensors. They are sent to each node once."""

    def __init__(self, arrays: Iterable[PlacedArray], executor: Executor) -> None:
        self.keys: dict[int, str] = {}
        self.kept: dict[str, Any] = {}
        # Ids stay theirs as long as they live.
        self._alive: list[object] = []
        found = list(arrays)
        for one in found:
            for loader in (one.sent.loader, one.sent.eval_loader):
                if loader is not None:
                    self._keep(loader, executor)
        counts = Counter(id(tensor) for one in found for tensor in {id(t): t for t in _frozen(one.sent)}.values())
        for one in found:
            for tensor in _frozen(one.sent):
                if counts[id(tensor)] > 1:
                    self._keep(tensor, executor)

    def _keep(self, value: object, executor: Executor) -> None:
        if id(value) not in self.keys:
            key = f"part {len(self.keys)}"
            self.keys[id(value)], self.kept[key] = key, executor.put(value)
            self._alive.append(value)


def _frozen(task: Task) -> Iterator[Tensor]:
    for model in [task.models] if isinstance(task.models, nn.Module) else task.models:
        for _, tensor in tensors(model):
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and not isinstance(model, FusedModule):
                yield tensor

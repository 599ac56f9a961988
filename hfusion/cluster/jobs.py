"""Plan tasks as arrays that are sent to devices, from the memory and rates that each device reported."""

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
from hfusion.cluster.messages import DeviceInfo, Executor
from hfusion.cluster.node import ArrayJob
from hfusion.cluster.placement import Load
from hfusion.cluster.serialization import pack_with_keys
from hfusion.core.errors import PlanError
from hfusion.core.fingerprint import read_model, read_state
from hfusion.device.calibrate import Rates
from hfusion.tasks.arrange import First, arrays_of, first_minibatches
from hfusion.tasks.array_plan import ArrayCost, Room
from hfusion.tasks.checkpoints import check_every, check_folder
from hfusion.tasks.minibatch import Minibatch
from hfusion.tasks.sharing import check_loaders, check_tensors
from hfusion.tasks.task import Task, shapes

# The rates from which seconds are estimated.
_COMPARED = ("flops", "memory", "calls", "load", "evict")

# Devices whose memory or speeds differ by less than this fraction count as equal.
DIFFERS = 0.1


class DeviceKinds:
    """The kinds of the devices of a cluster. Rates and memory of one kind differ by a tenth at most."""

    def __init__(self) -> None:
        self.representatives: list[Room] = []

    def kind(self, device: DeviceInfo) -> int:
        """Return the index of a device's kind in ``representatives``. A device of a new kind is appended."""
        for kind, room in enumerate(self.representatives):
            # Arrays are placed by the budget of the kind, so no device of the kind may have less.
            fits = room.budget <= device.budget <= room.budget * (1 + DIFFERS)
            if room.device == device.physical and fits and _alike(room.rates, device.rates):
                return kind
        self.representatives.append(Room(device.physical, device.budget, device.rates, keep=True))
        return len(self.representatives) - 1


def _alike(first: Rates, second: Rates) -> bool:
    pairs = [(getattr(first, name), getattr(second, name)) for name in _COMPARED]
    return all(max(pair) <= min(pair) * (1 + DIFFERS) for pair in pairs)


@dataclass(frozen=True)
class RunOptions:
    """Options that the arrays of a run share.

    Attributes:
        checkpoint: the folder of the run.
        every: the most minibatches that a crash can cost; None: those of an epoch.
        policy: the name of a policy.
        has_on_result: whether the driver has an ``on_result`` that decides which members stop.
    """

    checkpoint: Path | None
    every: int | None
    policy: str
    has_on_result: bool = False


@dataclass(frozen=True, eq=False)
class PlacedArray:
    """An array of a task, as the driver knows it.

    Attributes:
        load: its estimated seconds on each kind of device.
        sent: a copy of the task, as it is sent to the worker.
        cost: estimates its seconds on devices that join later.
    """

    task: Task
    members: tuple[int, ...]
    load: Load
    sent: Task
    options: RunOptions
    cost: ArrayCost

    def job(self, parts: SharedParts) -> ArrayJob:
        parcel, keys = pack_with_keys(f"the task {self.task.name!r}", self.sent, parts.keys)
        options = self.options
        return ArrayJob(
            self.load.name,
            self.members,
            parcel,
            {key: parts.references[key] for key in keys},
            options.policy,
            options.checkpoint,
            options.every,
            options.has_on_result,
            bool(self.task.callbacks),
        )

    def trained_array(self) -> FusedModule:
        """Return the array of this process into which results are written."""
        models = self.task.models
        if isinstance(models, FusedModule):
            return models
        model_list = [models] if isinstance(models, nn.Module) else models
        return fuse([model_list[index] for index in self.members])


@dataclass(frozen=True, eq=False)
class ClusterArrays:
    """All arrays of a run. ``kinds``: for each device, the index of its kind in ``Load.seconds``."""

    tasks: tuple[Task, ...]
    arrays: tuple[PlacedArray, ...]
    kinds: tuple[int, ...]
    device_kinds: DeviceKinds

    def kind_of(self, device: DeviceInfo) -> tuple[int, list[float | None] | None]:
        """Return the kind of a device that joins and, if the kind is new, the estimated seconds of each array on it."""
        kinds_before, kind = len(self.device_kinds.representatives), self.device_kinds.kind(device)
        if kind < kinds_before:
            return kind, None
        room = self.device_kinds.representatives[kind]
        return kind, [array.cost.seconds_on(room) for array in self.arrays]


def arranged(
    tasks: Sequence[Task], devices: Sequence[DeviceInfo], options: RunOptions, *, resume: bool
) -> ClusterArrays:
    """Group the members of tasks into arrays that fit the largest device, and estimate their seconds on each kind.

    Raises:
        PlanError, FusionError: see `hfusion.plan`.
        CheckpointError: the folder cannot be created, or holds saves that this run must not continue.
    """
    check_every(options.every)
    check_schedulers(tasks)
    device_kinds = DeviceKinds()
    kinds = tuple(map(device_kinds.kind, devices))
    check_tensors(tasks)
    largest_device = max(devices, key=lambda device: device.budget)
    largest = Room(largest_device.physical, largest_device.budget, largest_device.rates, keep=True)
    arrays: list[PlacedArray] = []
    alike = AlikeTasks(largest)
    for task in tasks:
        for members, cost in alike.arrays(task):
            load = Load(cost.name, tuple(map(cost.seconds_on, device_kinds.representatives)))
            arrays.append(PlacedArray(task, members, load, seeded_task(sent_task(task, members)), options, cost))
    check_loaders([(array.load.name, (array.task.loader, array.task.eval_loader)) for array in arrays])
    if options.checkpoint is not None:
        check_folder(options.checkpoint, [array.load.name for array in arrays], resume=resume)
    return ClusterArrays(tuple(tasks), tuple(arrays), kinds, device_kinds)


def check_schedulers(tasks: Iterable[Task]) -> None:
    """Raise PlanError if a task has a scheduler object, which is bound to an optimizer of this process."""
    for task in tasks:
        if isinstance(task.scheduler, lr_scheduler.LRScheduler):
            raise PlanError(
                f"task {task.name!r}: a scheduler that exists cannot go to another process; give a function that makes "
                "one from an optimizer"
            )


def sent_task(task: Task, members: Sequence[int]) -> Task:
    """Return a copy of the task for another process: without callbacks, and only with the models of ``members``."""
    models = task.models
    if not isinstance(models, nn.Module):
        indices, placeholder = set(members), nn.Identity()
        models = [model if index in indices else placeholder for index, model in enumerate(models)]
    return replace(task, models=models, callbacks=())


def seeded_task(task: Task) -> Task:
    """Return the task with a seed: its own, or one drawn from torch's generator, in the order of the calls."""
    return replace(task, seed=int(torch.randint(1 << 62, (), device="cpu")) if task.seed is None else task.seed)


class SharedParts:
    """Objects that several arrays share: loaders, and frozen tensors. They are sent to each node once."""

    def __init__(self, arrays: Iterable[PlacedArray], executor: Executor) -> None:
        self.keys: dict[int, str] = {}
        self.references: dict[str, Any] = {}
        # References keep the objects alive, so that their ids are not reused.
        self._alive: list[object] = []
        array_list = list(arrays)
        for array in array_list:
            for loader in (array.sent.loader, array.sent.eval_loader):
                if loader is not None:
                    self._keep(loader, executor)
        counts = Counter(
            id(tensor) for array in array_list for tensor in {id(t): t for t in _frozen(array.sent)}.values()
        )
        for array in array_list:
            for tensor in _frozen(array.sent):
                if counts[id(tensor)] > 1:
                    self._keep(tensor, executor)

    def _keep(self, value: object, executor: Executor) -> None:
        if id(value) not in self.keys:
            key = f"part {len(self.keys)}"
            self.keys[id(value)], self.references[key] = key, executor.put(value)
            self._alive.append(value)


def _frozen(task: Task) -> Iterator[Tensor]:
    for model in [task.models] if isinstance(task.models, nn.Module) else task.models:
        for _, tensor in tensors(model):
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and not isinstance(model, FusedModule):
                yield tensor


# Share plans between equal tasks, such as one small model per customer: only the first one is planned.


class AlikeTasks:
    """Groups the members of tasks into arrays and estimates their costs. Equal tasks share the result.

    Planning fuses the models and creates the optimizer, and the worker process does both again. For a small task this
    takes longer than to train it for some minibatches.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._planned_arrays: dict[Any, list[tuple[tuple[int, ...], ArrayCost]]] = {}

    def arrays(self, task: Task) -> list[tuple[tuple[int, ...], ArrayCost]]:
        """Return the members and the cost of each array of a task. Raises as `arrays_of`."""
        try:
            first = first_minibatches(task)
            key = _key(task, first)
        except Exception as error:
            error.add_note(f"in the task {task.name!r}")
            raise
        if key not in self._planned_arrays:
            # Keep the members and costs only: the arrays fused for planning are not needed any more.
            planned = [(arrangement.members, arrangement.cost) for arrangement in arrays_of(task, self._room, first)]
            if key is None:
                return planned
            self._planned_arrays[key] = planned
        return [(members, _of(task, cost)) for members, cost in self._planned_arrays[key]]


def _key(task: Task, first: First) -> Any:
    """Return a hashable key of all that the plan of a task depends on; None if there is none."""
    if isinstance(task.models, FusedModule) or not callable(task.optimizer):
        return None
    models = [task.models] if isinstance(task.models, nn.Module) else list(task.models)
    # Called for its errors: nothing else checks single models.
    shapes(models)
    states = [read_model(model) for model in models]
    functions = [read_state(function) for function in (task.optimizer, task.loss)]
    if any(state is None for state in [*states, *functions]):
        return None
    first_indices: dict[int, int] = {}
    owned = (tensor for model in models for _, tensor in tensors(model))
    return (
        (*states, *functions),
        # Which tensors are tied.
        tuple(first_indices.setdefault(id(tensor), index) for index, tensor in enumerate(owned)),
        (*(_minibatch_key(task, item) for item in (first.trained, first.evaluated)), first.shapes),
        (task.steps, task.epoch, task.accumulate, task.evaluated, task.clip_norm is None, task.compile),
    )


def _minibatch_key(task: Task, item: Any) -> Any:
    """Return a hashable key of the properties of a loader's item that the plan depends on; None for no item."""
    if item is None:
        return None
    return Minibatch.of(task, item, range(task.members)).key


def _of(task: Task, cost: ArrayCost) -> ArrayCost:
    """Return the cost of an array for an equal task, with the array's name in that task."""
    return replace(cost, task=task, name=task.name + cost.name.removeprefix(cost.task.name))

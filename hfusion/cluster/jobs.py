"""What is sent to the workers of a cluster: tasks, their arrays, and the objects that they share."""

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
from hfusion.cluster.messages import DeviceInfo, Executor, pack_with_keys
from hfusion.cluster.node import ArrayJob
from hfusion.core.errors import PlanError
from hfusion.tasks.array_plan import Room
from hfusion.tasks.checkpoints import check_every, check_folder
from hfusion.tasks.sharing import check_loaders, check_tensors
from hfusion.tasks.task import Task


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
    """A task, or an array of it once a worker has planned the task as several arrays.

    Attributes:
        sent: a copy of the task, with a seed, as it is sent to the worker.
        room: the device that the worker plans the task for; None for an array of a task that is planned.
    """

    task: Task
    members: tuple[int, ...]
    name: str
    sent: Task
    options: RunOptions
    room: Room | None

    @property
    def size(self) -> float:
        """An estimate of the work by which arrays are compared: parameters that are stepped, over all minibatches."""
        models = self.sent.models
        found = models if isinstance(models, nn.Module) else [models[member] for member in self.members]
        modules = [found] if isinstance(found, nn.Module) else found
        return self.task.steps * float(sum(tensor.numel() for model in modules for _, tensor in tensors(model)))

    def array(self, name: str, members: tuple[int, ...]) -> PlacedArray:
        """Return an array of this task."""
        return replace(self, name=name, members=members, sent=sent_task(self.sent, members), room=None)

    def job(self, parts: SharedParts) -> ArrayJob:
        parcel, keys = pack_with_keys(f"the task {self.task.name!r}", self.sent, parts.keys)
        options = self.options
        return ArrayJob(
            self.name,
            self.members,
            parcel,
            {key: parts.references[key] for key in keys},
            self.room,
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


def placed_tasks(
    tasks: Sequence[Task], devices: Sequence[DeviceInfo], options: RunOptions, *, resume: bool
) -> list[PlacedArray]:
    """Return what is sent of the tasks. A worker plans each for the largest device, and trains its first array.

    Raises:
        PlanError: tasks cannot be trained together, or have what cannot be sent.
        CheckpointError: the folder cannot be created, or holds saves that this run must not continue.
    """
    check_every(options.every)
    check_schedulers(tasks)
    check_tensors(tasks)
    check_loaders([(task.name, (task.loader, task.eval_loader)) for task in tasks])
    if options.checkpoint is not None:
        check_folder(options.checkpoint, [task.name for task in tasks], resume=resume)
    largest = max(devices, key=lambda device: device.budget)
    room = Room(largest.physical, largest.budget, largest.rates, keep=True)
    return [
        PlacedArray(task, members, task.name, seeded_task(sent_task(task, members)), options, room)
        for task in tasks
        for members in [tuple(range(task.members))]
    ]


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
    """Objects that several models or arrays share: loaders, and frozen tensors. They are sent to each node once."""

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
        frozen = [tensor for array in array_list for tensor in _frozen(array.sent)]
        counts = Counter(map(id, frozen))
        for tensor in frozen:
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

"""From tasks to the arrays that are sent to devices: planned here, by what each device said of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hfusion.array.module import FusedModule
from hfusion.capture.named import tensors
from hfusion.checkpoint import files
from hfusion.cluster.executor import Executor
from hfusion.cluster.node import ArrayJob, DeviceInfo
from hfusion.cluster.parcel import pack
from hfusion.cluster.placement import Load
from hfusion.core.errors import CheckpointError, PlanError
from hfusion.core.text import file_name
from hfusion.tasks.arrange import Arrangement, Room, arrays_of
from hfusion.tasks.checkpoints import check_every
from hfusion.tasks.sharing import check_loaders, check_tensors
from hfusion.tasks.task import Task


@dataclass(frozen=True, eq=False)
class PlacedArray:
    """An array: whose task and members, and its seconds on each kind of device. ``sent``: the task as it goes there."""

    task: Task
    members: tuple[int, ...]
    load: Load
    sent: Task
    checkpoint: Path | None
    every: int | None
    policy: str

    def job(self, parts: SharedParts) -> ArrayJob:
        what = f"the task {self.task.name!r}"
        parcel = pack(what, self.sent, parts.keys)
        return ArrayJob(self.load.name, self.members, parcel, parts.kept, self.policy, self.checkpoint, self.every)


@dataclass(frozen=True, eq=False)
class ClusterArrays:
    """All arrays of a run; ``kinds``: of each device, the index of its seconds in the loads."""

    tasks: tuple[Task, ...]
    arrays: tuple[PlacedArray, ...]
    kinds: tuple[int, ...]


def arranged(
    tasks: Sequence[Task],
    devices: Sequence[DeviceInfo],
    checkpoint: Path | None,
    every: int | None,
    policy: str,
    *,
    resume: bool,
) -> ClusterArrays:
    """The arrays that the largest device would have, as `hfusion.train` on a machine of these devices.

    Raises:
        PlanError, FusionError: as `hfusion.plan`.
        CheckpointError: the folder cannot be made, or holds what is not to go on.
    """
    check_every(every)
    for task in tasks:
        if isinstance(task.scheduler, lr_scheduler.LRScheduler):
            raise PlanError(
                f"task {task.name!r}: a scheduler that exists cannot go to another process; give a function that makes "
                "one from an optimizer"
            )
    rooms = list(dict.fromkeys((device.physical, device.budget, device.rates) for device in devices))
    kinds = tuple(rooms.index((device.physical, device.budget, device.rates)) for device in devices)
    check_tensors(tasks)
    largest = Room(*max(rooms, key=lambda room: room[1]), keep=True)
    arrays: list[PlacedArray] = []
    for task in tasks:
        # What was fused to plan is not needed any more.
        for one in arrays_of(task, largest):
            seconds = tuple(one.seconds_on(Room(*room, keep=True)) for room in rooms)
            load = Load(one.plan.name, seconds, task.name, task.steps)
            folder = None if checkpoint is None else checkpoint / file_name(load.name)
            arrays.append(PlacedArray(task, one.members, load, _sent(one), folder, every, policy))
    check_loaders([(one.load.name, (one.task.loader, one.task.eval_loader)) for one in arrays])
    if checkpoint is not None:
        _check_folder(checkpoint, resume=resume)
    return ClusterArrays(tuple(tasks), tuple(arrays), kinds)


def _check_folder(root: Path, *, resume: bool) -> None:
    with files.told(root):
        root.mkdir(parents=True, exist_ok=True)
        folders = [path for path in root.iterdir() if path.is_dir()]
        there = sorted(unquote(path.name) for path in folders if any(map(files.saves, path.iterdir())))
    if there and not resume:
        raise CheckpointError(f"{root} holds saves of {there}: go on with resume=True, or give a new folder")
    if files.saves(root) or any(map(files.saves, folders)):
        raise CheckpointError(f"{root} holds saves of a run on one machine: go on with it there, or give a new folder")


def _sent(one: Arrangement) -> Task:
    """The task with the models of one array, and the seed that it would draw."""
    task, models = one.task, one.task.models
    if not isinstance(models, nn.Module):
        own, absent = set(one.members), nn.Identity()
        models = [model if index in own else absent for index, model in enumerate(models)]
    # As a run on one machine draws them, in the order of the arrays.
    seed = int(torch.randint(1 << 62, ())) if task.seed is None else task.seed
    return replace(task, models=models, seed=seed, callbacks=())


class SharedParts:
    """What several arrays hold: loaders, and frozen tensors. It goes to every node once."""

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

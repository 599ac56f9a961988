"""Checks of concurrent tasks: they must not share memory that one of them writes, nor data readers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors
from hfusion.core.errors import PlanError
from hfusion.core.membership import check_whole_stack
from hfusion.tasks.reading import generators
from hfusion.tasks.task import Task, listed_models

# The tensors that runs of this process train in place, by id, with the task of each.
_tensor_owners: dict[int, str] = {}
_reservation_lock = Lock()


def listed(tasks: Any) -> list[Task]:
    """Return the tasks as a list. Raises PlanError for none, other objects, and repeated tasks or names."""
    task_list = [tasks] if isinstance(tasks, Task) or not isinstance(tasks, Iterable) else list(tasks)
    if not task_list:
        raise PlanError("there is no task: give at least one hf.Task")
    by_name: dict[str, Task] = {}
    for index, task in enumerate(task_list):
        if not isinstance(task, Task):
            raise PlanError(f"task {index} must be an hf.Task, got {type(task).__name__}")
        other = by_name.get(task.name)
        if other is task:
            raise PlanError(f"task {task.name!r} is given twice: give it once, or make a second one of its own")
        if other is not None:
            raise PlanError(f"two tasks are named {task.name!r}: give each its own name")
        by_name[task.name] = task
    return task_list


def check_tensors(tasks: Sequence[Task]) -> None:
    """Raise PlanError if a task uses memory that another task trains in place.

    Lists of models are copied before anything runs, so these may share models; frozen tensors are only read.
    """
    for task in tasks:
        for model in [task.models] if isinstance(task.models, FusedModule) else ():
            for _, tensor in tensors(model):
                check_whole_stack(tensor, "hf.train shards arrays by itself, within the memory of each device")
    written = sorted(
        (*_memory(tensor), writer, name) for writer, task in enumerate(tasks) for name, tensor in _written(task)
    )
    shared: list[tuple[int, int, str, str]] = []
    for other, task in enumerate(tasks if written else ()):
        for name, tensor in _reached(task):
            start, end = _memory(tensor)
            # The last range that begins before this one ends. Of two written ranges that overlap, one finds the other.
            last = bisect_left(written, (end,)) - 1
            if start < end and last >= 0 and written[last][1] > start:
                # Of equal ranges, the first task's.
                _, _, writer, written_name = written[bisect_left(written, written[last][:2])]
                if writer != other:
                    shared.append((writer, other, name, written_name))
    if shared:
        first, second, name, written_name = min(shared, key=lambda pair: pair[:2])
        writer_name, other_name = tasks[first].name, tasks[second].name
        raise PlanError(
            f"tasks {writer_name!r} and {other_name!r} share memory: {name!r} of {other_name!r} is {written_name!r} of "
            f"the array that {writer_name!r} trains in place. Train both in one task, one after the other in two "
            "calls, or give one of them a copy (copy.deepcopy, array.unfuse())"
        )


@contextmanager
def reserve_tensors(tasks: Sequence[Task]) -> Iterator[None]:
    """Context manager: reserve the tensors that tasks train in place. Raises PlanError if another run uses them."""
    with _reservation_lock:
        for task in tasks:
            for name, tensor in _reached(task):
                if id(tensor) in _tensor_owners:
                    raise PlanError(
                        f"task {task.name!r} shares {name!r} with the task {_tensor_owners[id(tensor)]!r} of another "
                        "hf.train, which trains it and has not ended: train one after the other, or give one of them "
                        "a copy (copy.deepcopy, array.unfuse())"
                    )
        task_names = {id(tensor): task.name for task in tasks for _, tensor in _written(task)}
        _tensor_owners.update(task_names)
    try:
        yield
    finally:
        with _reservation_lock:
            for key in task_names:
                del _tensor_owners[key]


def _written(task: Task) -> Iterator[tuple[str, Tensor]]:
    """Yield the user's tensors that training changes, with their names."""
    if isinstance(task.models, FusedModule):
        for name, tensor in tensors(task.models):
            if tensor.numel() and (tensor.requires_grad or not isinstance(tensor, nn.Parameter)):
                yield name, tensor


def _reached(task: Task) -> Iterator[tuple[str, Tensor]]:
    for index, model in enumerate(listed_models(task)):
        for name, tensor in tensors(model):
            yield name if model is task.models else f"model {index}: {name}", tensor


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return start and end address of a tensor's storage. A member's storage may lie within its array's."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def check_loaders(arrays: Sequence[tuple[str, Task]]) -> None:
    """Raise PlanError if the loaders of two arrays, given by name and task, share an iterator or a random generator.

    The order of their reads depends on timing, so neither array would be trained as if alone.
    """
    first: dict[int, tuple[str, object]] = {}
    for name, task in arrays:
        parts = {id(part): part for loader in (task.loader, task.eval_loader) for part in _parts(loader)}
        for key, part in parts.items():
            if key not in first:
                continue
            generator = isinstance(part, torch.Generator)
            conflict = "draw from one torch.Generator" if generator else "read with the workers of one DataLoader"
            remedy = "leave it out: hf.Task(seed=...) settles the order" if generator else "persistent_workers=False"
            raise PlanError(f"{first[key][0]!r} and {name!r} {conflict}: give each its own DataLoader, or {remedy}")
        # The objects are held, so that no id is reused.
        first |= {key: (name, part) for key, part in parts.items()}


def _parts(loader: Any) -> Iterator[Any]:
    """Yield the objects that readers of a loader would share."""
    yield from generators(loader)
    # Without persistent workers, each iterator of a DataLoader starts its own workers.
    if getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0):
        yield loader

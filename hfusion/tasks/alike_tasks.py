"""Share plans between equal tasks, such as one small model per customer: only the first one is planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors
from hfusion.core.fingerprint import read_model, read_state
from hfusion.tasks.arrange import First, arrays_of, first_minibatches
from hfusion.tasks.array_plan import ArrayCost, Room
from hfusion.tasks.minibatch import Minibatch
from hfusion.tasks.task import Task, shapes


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

"""A minibatch of a loader, as a call of an array."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import device_of
from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import StackedInput, is_stacked, take_entries
from hfusion.core.errors import PlanError
from hfusion.core.ragged import Ragged
from hfusion.tasks.task import Task

Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Minibatch:
    """One minibatch as a call of the array, with the target for its loss."""

    arguments: Arguments
    target: Any

    @staticmethod
    def of(task: Task, item: Any, members: Sequence[int]) -> Minibatch:
        """Return a loader's item for ``members`` only. Raises PlanError for an item of another form."""
        pair: list[Any] = list(item) if isinstance(item, list | tuple) else []
        if len(pair) != 2:
            form = f"{len(pair)} values" if pair else type(item).__name__
            raise PlanError(
                f"task {task.name!r}: a minibatch of the loader is {form}; it must be a pair (inputs, target), inputs "
                "a tensor, a tuple of arguments or a dict of keyword arguments"
            )
        inputs, target = pair[0], pair[1]
        if len(members) != task.members:
            inputs, target = (take_entries(value, list(members)) for value in (inputs, target))
        if isinstance(inputs, Mapping):
            return Minibatch(Arguments.of((), inputs), target)
        return Minibatch(Arguments.of(tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,), {}), target)

    def arguments_for(self, array: FusedModule) -> Arguments:
        """Return the arguments for capture, on the device of ``array``. Loaders may use another device.

        Raises:
            PlanError: members' inputs have different sizes.
        """
        device, arguments = device_of(array), self.arguments
        if arguments.ragged:
            raise PlanError(
                f"a minibatch gives the members of one array inputs of different sizes, {arguments.ragged[0]}, and "
                "hf.train computes an array by one program: give inputs of one size, or use hf.train_step or "
                "hf.Population"
            )
        if all(value.device == device for value in arguments.values if isinstance(value, Tensor)):
            return arguments
        return Arguments(tuple(moved(leaf, device) for leaf in arguments.leaves), arguments.spec)

    @property
    def shapes(self) -> Shapes:
        """The shapes of the inputs as a member sees them, the largest of each; empty for values without dims."""
        leaves = self.arguments.leaves
        return tuple(
            tuple(max((tensor.shape for tensor in leaf), key=math.prod)) if isinstance(leaf, Ragged) else shape
            for leaf, shape in zip(leaves, self.arguments.shapes, strict=True)
        )

    @property
    def key(self) -> Any:
        """A hashable key. Minibatches with equal keys share a recipe."""
        inputs = self.arguments.key, self.arguments.memory_orders
        if isinstance(self.target, Tensor):
            return inputs, ((tuple(self.target.shape), self.target.dtype),)
        leaves = pytree.tree_leaves(self.target, is_leaf=is_stacked)
        tensors = [
            tensor
            for leaf in leaves
            for tensor in (leaf if isinstance(leaf, Ragged) else [leaf.tensor if is_stacked(leaf) else leaf])
        ]
        shapes = tuple((tuple(t.shape), t.dtype) if isinstance(t, Tensor) else type(t) for t in tensors)
        return inputs, shapes


def samples(shapes: Shapes) -> int:
    """Return the size of the first dim of the first input with dims; 1 if there is none."""
    return next((shape[0] for shape in shapes if shape), 1)


def largest(shapes: Shapes, others: Shapes) -> Shapes:
    """Return ``shapes`` with every size at least that in ``others``. Inputs of another number of dims are ignored."""
    pairs = zip(shapes, (*others, *shapes[len(others) :]), strict=False)
    return tuple(tuple(map(max, a, b)) if len(a) == len(b) else a for a, b in pairs)


def moved(leaf: Any, device: torch.device) -> Any:
    """Return a tensor, or a value that holds tensors, on ``device`` and detached. Other values are unchanged."""
    if isinstance(leaf, StackedInput):
        return StackedInput(moved(leaf.tensor, device))
    if isinstance(leaf, Ragged):
        return leaf.map(lambda tensor: moved(tensor, device))
    if not isinstance(leaf, Tensor) or (leaf.device == device and not leaf.requires_grad):
        return leaf
    return leaf.detach().to(device, non_blocking=True)

"""Minibatches of a task, and the recipes by which the runtime computes them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hfusion.compile import Arguments, Compiled
from hfusion.errors import PlanError
from hfusion.inputs import StackedInput, is_stacked
from hfusion.layout import Layout
from hfusion.module import FusedModule
from hfusion.passes.cost import operators
from hfusion.passes.flops import concrete
from hfusion.passes.split import input_names, split
from hfusion.per_model import PerModel
from hfusion.plan import Shard
from hfusion.program import Part, Program
from hfusion.runtime.training import Batch, Recipe
from hfusion.task import Task


@dataclass(frozen=True)
class Minibatch:
    """One minibatch as a call of the array, with the target for its loss."""

    arguments: Arguments
    target: Any

    @staticmethod
    def of(task: Task, found: Any, members: Sequence[int]) -> Minibatch:
        """What the loader gave, of which only ``members`` are trained here. Raises PlanError for another form."""
        pair: list[Any] = list(found) if isinstance(found, list | tuple) else []
        if len(pair) != 2:
            form = f"{len(pair)} values" if pair else type(found).__name__
            raise PlanError(
                f"task {task.name!r}: a minibatch of the loader is {form}; it must be a pair (inputs, target), inputs "
                "a tensor, a tuple of arguments or a dict of keyword arguments"
            )
        inputs, target = pair[0], pair[1]
        if len(members) != task.members:
            inputs, target = _rows((inputs, target), members)
        if isinstance(inputs, Mapping):
            return Minibatch(Arguments.of((), inputs), target)
        return Minibatch(Arguments.of(tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,), {}), target)

    @property
    def samples(self) -> int:
        """The size of the first dim that members see; 1 where no tensor has one."""
        for leaf in self.arguments.leaves:
            shape: Any = leaf.tensor.shape[1:] if isinstance(leaf, StackedInput) else getattr(leaf, "shape", ())
            if len(shape):
                return int(shape[0])
        return 1

    @property
    def key(self) -> Any:
        """Hashable; minibatches with one key have one recipe."""
        leaves = pytree.tree_leaves(self.target, is_leaf=is_stacked)
        tensors = [leaf.tensor if is_stacked(leaf) else leaf for leaf in leaves]
        shapes = tuple((tuple(t.shape), t.dtype) if isinstance(t, Tensor) else type(t) for t in tensors)
        return self.arguments.key, shapes


def _rows(values: Any, members: Sequence[int]) -> Any:
    """What belongs to single members, of these only."""

    def rows(leaf: Any) -> Any:
        return StackedInput(leaf.tensor[list(members)]) if is_stacked(leaf) else leaf

    return pytree.tree_map(rows, values, is_leaf=is_stacked)


class Stream:
    """The minibatches of all epochs for the array of ``members``, computed in ``shards``."""

    def __init__(
        self,
        task: Task,
        array: FusedModule,
        members: Sequence[int],
        loss: PerModel,
        shards: Sequence[Shard],
        batch: int,
    ) -> None:
        self._task = task
        self._array = array
        self._members = members
        self._loss = loss
        self._shards = shards
        self._batch = batch
        self._minibatches = self._read()
        self._latest: Minibatch
        self._recipes: dict[Any, Recipe] = {}
        self._operators: list[Any] | None = None

    def next(self) -> Batch:
        """The next minibatch. Raises PlanError if the loader gives fewer than its length says."""
        found = next(self._minibatches, None)
        if found is None:
            raise PlanError(f"task {self._task.name!r}: the loader gave fewer minibatches than its length says")
        self._latest = found
        return Batch(tuple(_detached(value) for value in found.arguments.values), found.target, found.key)

    def find(self, batch: Batch) -> Recipe | None:
        """The recipe for batches like this one, if there is one."""
        return self._recipes.get(batch.key)

    def make(self, batch: Batch) -> Recipe:
        """Capture what is needed for batches like this one."""
        return self.prepare(self._latest)

    def prepare(self, minibatch: Minibatch) -> Recipe:
        """The recipe for minibatches like this one. Raises FusionError or PlanError."""
        compiled = self._array.compiled(minibatch.arguments)
        self._array.check(compiled, minibatch.arguments)
        program = compiled.program
        self._check_same(program)
        examples = _examples(program, minibatch.samples)
        self._losses(program, examples, minibatch.target)
        recipe = Recipe(
            split(program, self._shards, self._batch),
            input_names(program),
            compiled.constants,
            lambda outputs, target: self._losses(program, outputs, target),
            random=_random(compiled) or not self._loss.programs or any(map(_draws, self._loss.programs)),
        )
        self._recipes[minibatch.key] = recipe
        return recipe

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the first recipe; those of all others use the same tensors."""
        return next(iter(self._recipes.values())).parts

    def _read(self) -> Iterator[Minibatch]:
        for _ in range(self._task.epochs):
            for _, found in zip(range(self._task.epoch), self._task.loader, strict=False):
                yield Minibatch.of(self._task, found, self._members)

    def _check_same(self, program: Program) -> None:
        """The shards number the operators of the first program; another kind of minibatch must have the same."""
        found = [node.target for node in operators(program)]
        if self._operators is None:
            self._operators = found
        elif self._operators != found:
            raise PlanError(
                f"task {self._task.name!r}: a minibatch of another kind than the first needs another program, whose "
                f"operators differ ({len(found)} instead of {len(self._operators)}); give minibatches of one shape, "
                "for example with drop_last=True"
            )

    def _losses(self, program: Program, outputs: Sequence[Any], target: Any) -> Tensor:
        value = outputs[0] if program.out_spec.is_leaf() else pytree.tree_unflatten(list(outputs), program.out_spec)
        device = next(leaf.device for leaf in outputs if isinstance(leaf, Tensor))
        losses = self._loss(value, _on(target, device))
        if not isinstance(losses, Tensor) or losses.shape != (len(self._members),):
            given = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise PlanError(
                f"task {self._task.name!r}: the losses of {len(self._members)} members have {given}; the loss must "
                "reduce to one number per member, for example with reduction='mean'"
            )
        return losses


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _on(target: Any, device: torch.device) -> Any:
    def move(leaf: Any) -> Any:
        if is_stacked(leaf):
            return StackedInput(leaf.tensor.to(device))
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(move, target, is_leaf=is_stacked)


def _examples(program: Program, samples: int) -> list[Any]:
    """Zeros in the shapes of the outputs, to prepare the loss with."""
    (outputs,) = next(node for node in program.module.graph.nodes if node.op == "output").args
    assert isinstance(outputs, list | tuple)
    return [_zeros(node, program.members, samples) if isinstance(node, fx.Node) else node for node in outputs]


def _zeros(node: fx.Node, members: int, samples: int) -> Any:
    example = node.meta.get("example")
    if not isinstance(example, Tensor):
        return example
    shape = concrete(example.shape, samples)
    stacked = shape if node.meta.get("layout") is Layout.SHARED else (members, *shape)
    zeros = torch.zeros(stacked, dtype=example.dtype)
    return zeros.requires_grad_() if example.is_floating_point() or example.is_complex() else zeros


def _random(compiled: Compiled) -> bool:
    """Whether the program draws random numbers, or runs code that may."""
    return bool(compiled.opaque) or _draws(compiled.program)


def _draws(program: Program) -> bool:
    origins = [node.meta.get("origin", node) for node in operators(program)]
    targets = [origin.target for origin in origins if origin.target is not operator.getitem]
    return any(torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) for target in targets)

"""Minibatches of a task, and the recipes by which the runtime computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hfusion.array.module import FusedModule
from hfusion.array.per_model import PerModel
from hfusion.capture.python_state import restored
from hfusion.capture.registered_tensors import device_of, tensors
from hfusion.compiler.arguments import Arguments, describe_leaf, is_tensors, map_leaf
from hfusion.compiler.compiled_program import Compiled
from hfusion.core.calls import Ragged, is_stacked, take_entries
from hfusion.core.errors import HFusionError, PlanError
from hfusion.core.layout import Layout
from hfusion.core.memory import same_values
from hfusion.core.program import Part, Program
from hfusion.core.python_values import IdentityRef
from hfusion.device.backend import backend
from hfusion.passes.candidates import draws_numbers
from hfusion.passes.cost.cost import operators, symbol_sizes
from hfusion.passes.cost.flops import SymbolSizes, concrete
from hfusion.passes.partition.split_program import input_names, match_cuts, split
from hfusion.runtime.training import Recipe
from hfusion.schedule.plan import Shard
from hfusion.tasks.reading import (
    Position,
    Reader,
    end_workers,
    length,
    reading,
    rereading,
    restart_workers,
    set_generators,
)
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
        return arguments.mapped(partial(_moved, device=device))

    def on(self, device: torch.device) -> Minibatch:
        """Return the minibatch on a device, without its autograd history."""
        return self.mapped(partial(_moved, device=device))

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> Minibatch:
        """Return the minibatch with ``fn`` applied to every tensor."""
        return Minibatch(self.arguments.mapped(fn), map_tensors(self.target, fn))

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The flat inputs of the program."""
        return tuple(value.detach() if isinstance(value, Tensor) else value for value in self.arguments.values)

    @property
    def shapes(self) -> Shapes:
        """The shapes of the inputs as a member sees them, the largest of each; empty for values without dims."""
        leaves = self.arguments.leaves
        return tuple(
            tuple(max((tensor.shape for tensor in leaf), key=math.prod)) if isinstance(leaf, Ragged) else shape
            for leaf, shape in zip(leaves, self.arguments.shapes, strict=True)
        )

    @cached_property
    def key(self) -> Any:
        """A hashable key. Minibatches with equal keys share a recipe."""
        leaves = pytree.tree_leaves(self.target, is_leaf=is_stacked)
        kinds = tuple(describe_leaf(leaf) if is_tensors(leaf) else type(leaf) for leaf in leaves)
        return self.arguments.key, self.arguments.memory_orders, kinds


def samples(shapes: Shapes) -> int:
    """Return the size of the first dim of the first input with dims; 1 if there is none."""
    return next((shape[0] for shape in shapes if shape), 1)


def largest(shapes: Shapes, others: Shapes) -> Shapes:
    """Return ``shapes`` with every size at least that in ``others``. Inputs of another number of dims are ignored."""
    pairs = zip(shapes, (*others, *shapes[len(others) :]), strict=False)
    return tuple(tuple(map(max, a, b)) if len(a) == len(b) else a for a, b in pairs)


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``fn`` to all tensors of a nested value, including those in stacked inputs."""
    if isinstance(value, Tensor):
        return fn(value)
    return pytree.tree_map(lambda leaf: map_leaf(leaf, fn), value, is_leaf=is_stacked)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device and not tensor.requires_grad:
        return tensor
    return tensor.detach().to(device, non_blocking=True)


# Checked losses, by program and kind of minibatch: whether they may draw random numbers, and whether they keep state.
MAX_LOSSES = 256
_of_losses: dict[Any, tuple[bool, bool]] = {}


# Returns the program for minibatches like this one, and its parts. Raises FusionError or PlanError.
CutPrograms: TypeAlias = "Callable[[Minibatch], tuple[Compiled, tuple[Part, ...]]]"


def training_programs(name: str, array: FusedModule, shards: Sequence[Shard]) -> CutPrograms:
    """Return a function that captures programs for training, checks them against the members, and cuts them."""
    first: list[Any] = []

    def make(minibatch: Minibatch) -> tuple[Compiled, tuple[Part, ...]]:
        arguments = minibatch.arguments_for(array)
        compiled = array.steady(arguments)
        array.check(compiled, arguments)
        targets = [node.target for node in operators(compiled.program)]
        # Shards are ranges of operators.
        if first and first != targets:
            raise PlanError(
                f"task {name!r}: a minibatch of another kind than the first needs another program, whose operators "
                f"differ ({len(targets)} instead of {len(first)}); give minibatches of one shape, for example with "
                "drop_last=True"
            )
        first[:] = targets
        return compiled, split(compiled.program, [shard.last for shard in shards])

    return make


def evaluation_parts(
    array: FusedModule, names: Mapping[str, str], held: Sequence[frozenset[str]], minibatch: Minibatch
) -> tuple[Compiled, tuple[Part, ...]]:
    """Capture the program in eval mode, and cut it so that each shard uses what it holds in training, see `match_cuts`.

    The mode of the array is restored.
    """
    with array.evaluating():
        compiled = array.compiled(minibatch.arguments_for(array))
    return compiled, split(compiled.program, match_cuts(compiled.program, names, held))


@dataclass(eq=False)
class Stream:
    """The minibatches of a loader in all epochs, for the array of ``members``.

    Args:
        planned: the largest inputs that the plan allows.
        devices: the devices that may compute the array.
        turn: held while a minibatch is read. Workers of a DataLoader read from copies, so they need none.
    """

    task: Task
    loader: Iterable[Any]
    members: Sequence[int]
    programs: CutPrograms
    planned: Shapes
    loss: PerModel
    devices: Sequence[torch.device]
    turn: AbstractContextManager[Any]

    def __post_init__(self) -> None:
        self._pins = any(backend(device).pins for device in self.devices)
        self._open: Iterator[Any] | None = None
        self._resumed: Position | None = None
        self._began: Position | None = None
        self._yielded_count = 0
        self._stopped = self.keeps_state = False
        self._items = self._read()
        self._reader = Reader(self._items, f"{self.task.name} reads", lambda: end_workers(self._open))
        self._recipes: dict[Any, Recipe] = {}

    def next(self, drawing: AbstractContextManager[None] | None = None) -> Minibatch:
        """Return the next minibatch. Raises PlanError if an epoch was shorter or longer than the loader's length."""
        if type(self.loader) in (list, tuple):
            # A list never waits and draws no random numbers, so reading it here is cheaper than in another thread.
            if self._stopped:
                raise CancelledError
            minibatch = next(self._items)
        else:
            turn = nullcontext() if getattr(self.loader, "num_workers", None) else self.turn
            minibatch = self._reader.next(turn, drawing or nullcontext())
        # Pin once, for all units that copy these tensors.
        return minibatch.mapped(_pinned) if self._pins else minibatch

    @property
    def position(self) -> Position:
        """Return the position in the loader. Between minibatches only."""
        if self._began is None:
            # Nothing was read in this run, but maybe in the run that it resumes.
            return self._resumed or Position.at_start(0, None, self.loader)
        return self._began.at(self._yielded_count, self.loader)

    def resume(self, position: Position) -> None:
        """Start reading at ``position``. Call it before the first `next`."""
        self._resumed = position

    def restart(self) -> None:
        """End persistent workers, which planning has started, so that the first epoch draws as by a new loader.

        A run that goes on in a later epoch keeps them, since their start draws a number. Call it after `resume`.
        """
        if self._resumed is None or not self._resumed.epoch:
            restart_workers(self.loader)

    def finish(self, drawing: AbstractContextManager[None]) -> None:
        """Raise PlanError if there are more minibatches after the last one of all epochs. `position` stays.

        After `stop`, nothing is raised: a task that has been trained is done, even if another one fails meanwhile.
        """
        self._resumed, self._began = self.position, None
        with suppress(StopIteration, CancelledError):
            self.next(drawing)

    def close(self) -> None:
        """Stop reading, and end the loader's processes and threads.

        After `stop`, the thread of a loader that hangs is abandoned.
        """
        self._reader.close()

    def stop(self) -> None:
        """Let `next`, also a waiting one, raise CancelledError."""
        self._stopped = True
        self._reader.stop()

    def find(self, minibatch: Minibatch) -> Recipe | None:
        """Return the recipe for minibatches like this one, or None."""
        return self._recipes.get(minibatch.key)

    def prepare(self, minibatch: Minibatch) -> Recipe:
        """Capture the program, check the loss, and return the recipe. Raises FusionError or PlanError."""
        for shape, planned in zip(minibatch.shapes, self.planned, strict=False):
            if shape[:1] > planned[:1]:
                raise PlanError(
                    f"task {self.task.name!r}: a minibatch has {shape[0]} samples, but the plan counts with "
                    f"{samples((planned,))}, those of the first minibatch: let the first one of each loader be the "
                    "largest, or give a list of minibatches"
                )
        compiled, parts = self.programs(minibatch)
        program = compiled.program
        loss = self.loss.state()
        key = IdentityRef(program), loss, minibatch.key, tuple(self.devices)
        if loss is None or key not in _of_losses:
            sizes, keeps_state = symbol_sizes(program, minibatch.shapes), False
            for device in self.devices:
                keeps_state |= self._check_loss(program, _examples(program, sizes, device), minibatch.target)
                # Wait, so that asynchronous errors of the device are raised here and not in a later unit.
                backend(device).wait()
            if len(_of_losses) == MAX_LOSSES:
                _of_losses.clear()
            _of_losses[key] = not self.loss.programs or any(map(_draws, self.loss.programs)), keeps_state
        draws, self.keeps_state = _of_losses[key]
        recipe = Recipe(
            parts,
            input_names(program),
            compiled.constants,
            lambda outputs, target: self._losses(program, outputs, target),
            # Members' own code may draw, too.
            random=bool(compiled.opaque) or _draws(program) or draws,
            branching=program.members if compiled.opaque else None,
        )
        self._recipes[minibatch.key] = recipe
        return recipe

    def _read(self) -> Generator[Minibatch, None, None]:
        loader_length = length(self.loader)
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.random is None:
            set_generators(self.loader, resumed.own)
            resumed = None
        for epoch in range(0 if resumed is None else resumed.epoch, self.task.epochs):
            self._began = resumed or Position.at_start(epoch, torch.get_rng_state(), self.loader)
            # Read to the very end, like a plain loop: a loader may draw random numbers there.
            with reading(self.loader) if resumed is None else rereading(self.loader, resumed) as self._open:
                read_count = self._yielded_count = 0 if resumed is None else resumed.given
                resumed = None
                for item in self._open:
                    read_count += 1
                    if read_count > loader_length:
                        break
                    self._yielded_count = read_count
                    yield Minibatch.of(self.task, item, self.members)
            if read_count != loader_length:
                count = "more" if read_count > loader_length else str(read_count)
                role = "loader" if self.loader is self.task.loader else "eval_loader"
                raise PlanError(
                    f"task {self.task.name!r}: the {role} gave {count} minibatches in epoch {epoch}, but its length "
                    f"is {loader_length}: give one whose length is the number of its minibatches"
                )

    def _check_loss(self, program: Program, outputs: Sequence[Any], target: Any) -> bool:
        """Return whether every call changes what the loss keeps, which is as before afterwards.

        Raises PlanError if the loss fails, or its result has no gradient.
        """
        module = self.loss.module
        # `restored` puts back what functions of the user's reach. The loss may be an object, which is put back if it is
        # the default argument of such a function.
        reaching = FunctionType((lambda loss: loss).__code__, {"__name__": "__main__"}, None, (self.task.loss,))
        held = [(tensor.detach(), tensor.detach().clone()) for _, tensor in tensors(module)]
        try:
            with torch.enable_grad(), restored(PerModel(reaching).module), restored(module):
                # A first call may fill a cache.
                for _ in range(2):
                    state, values = self.loss.state(), [tensor.clone() for tensor, _ in held]
                    losses = self._losses(program, outputs, target)
                    same = all(same_values(tensor, before) for (tensor, _), before in zip(held, values, strict=True))
                    keeps_state = not same or self.loss.state() != state
                    if not keeps_state:
                        break
        except HFusionError:
            raise
        except Exception as error:
            shapes = ", ".join(str(list(value.shape)) for value in outputs if isinstance(value, Tensor))
            raise PlanError(
                f"task {self.task.name!r}: the loss failed at its first call, with ones of shape {shapes} as outputs "
                f"of {len(self.members)} members: {type(error).__name__}: {error}"
            ) from error
        finally:
            for tensor, before in held:
                tensor.copy_(before)
        if not losses.is_floating_point() or not losses.requires_grad:
            raise PlanError(
                f"task {self.task.name!r}: the losses, of dtype {losses.dtype}, have no gradient, so nothing would be "
                "trained: let the loss compute floating-point numbers from the outputs, without detach() or item()"
            )
        return keeps_state

    def _losses(self, program: Program, outputs: Sequence[Any], target: Any) -> Tensor:
        device = next(leaf.device for leaf in pytree.tree_leaves(list(outputs)) if isinstance(leaf, Tensor))
        value = outputs[0] if program.out_spec.is_leaf() else pytree.tree_unflatten(list(outputs), program.out_spec)
        losses = self.loss(value, map_tensors(target, lambda tensor: tensor.to(device, non_blocking=True)))
        if not isinstance(losses, Tensor) or losses.shape != (len(self.members),):
            form = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise PlanError(
                f"task {self.task.name!r}: the losses of {len(self.members)} members have {form}; the loss must "
                "reduce to one number per member, for example with reduction='mean'"
            )
        return losses


def _pinned(tensor: Tensor) -> Tensor:
    """Return a pinned copy of a contiguous CPU tensor, for asynchronous copies. Return other tensors unchanged."""
    plain = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
    return tensor.pin_memory() if plain else tensor


def _examples(program: Program, sizes: SymbolSizes, device: torch.device) -> list[Any]:
    """Return values in the shapes of the program's outputs, to try the loss with.

    They are ones, which are valid as probabilities and scales, too, and zeros for integers, which may be indices.
    """
    (outputs,) = next(node for node in program.module.graph.nodes if node.op == "output").args
    assert isinstance(outputs, list | tuple)
    return [_example(node, program.members, sizes, device) if isinstance(node, fx.Node) else node for node in outputs]


def _example(node: fx.Node, members: int, sizes: SymbolSizes, device: torch.device) -> Any:
    example = node.meta.get("example")
    if node.meta.get("layout") is Layout.LISTED and not isinstance(example, Tensor):
        return node.target(*node.args)  # type: ignore[operator]
    if isinstance(example, torch.SymFloat):
        return example.node.hint
    if not isinstance(example, Tensor):
        return concrete([example], sizes)[0] if isinstance(example, torch.SymInt) else example
    shape = concrete(example.shape, sizes)
    stacked = shape if node.meta.get("layout") is Layout.SHARED else (members, *shape)
    if example.is_floating_point() or example.is_complex():
        return torch.ones(stacked, dtype=example.dtype, device=device, requires_grad=True)
    return torch.zeros(stacked, dtype=example.dtype, device=device)


def _draws(program: Program) -> bool:
    return any(draws_numbers(node.meta.get("origin", node)) for node in operators(program))

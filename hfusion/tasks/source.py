"""Minibatches of a task, and the recipes by which the runtime computes them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hfusion.array.module import FusedModule
from hfusion.array.per_model import PerModel
from hfusion.array.shared_programs import check_once
from hfusion.compiler.compiled_program import Compiled
from hfusion.core.calls import StackedInput, is_stacked
from hfusion.core.errors import HFusionError, PlanError
from hfusion.core.layout import Layout
from hfusion.core.program import Part, Program
from hfusion.core.python_values import IdentityRef
from hfusion.core.ragged import Ragged
from hfusion.device.backend import backend
from hfusion.passes.candidates import draws_numbers
from hfusion.passes.cost.cost import operators, symbol_sizes
from hfusion.passes.cost.flops import SymbolSizes, concrete
from hfusion.passes.partition.split_program import input_names, match_cuts, split
from hfusion.runtime.recipe import Batch, Recipe
from hfusion.schedule.plan import Shard
from hfusion.tasks.minibatch import Minibatch, Shapes, samples
from hfusion.tasks.reading import Position, Reader, end_workers, length, reading, rereading
from hfusion.tasks.task import Task

# Checked losses, by program and kind of minibatch, and whether they may draw random numbers.
MAX_LOSSES = 256
_draws_of_losses: dict[Any, bool] = {}


# Returns the program for minibatches like this one, and its parts. Raises FusionError or PlanError.
CutPrograms: TypeAlias = "Callable[[Minibatch], tuple[Compiled, tuple[Part, ...]]]"


class Trained:
    """Programs for training, cut into the planned shards."""

    def __init__(self, name: str, array: FusedModule, shards: Sequence[Shard]) -> None:
        self._name = name
        self.array = array
        self._shards = shards
        self._operators: list[Any] | None = None

    def make(self, minibatch: Minibatch) -> tuple[Compiled, tuple[Part, ...]]:
        """Capture the program, check it against the members, and cut it into parts."""
        arguments = minibatch.arguments_for(self.array)
        compiled = self.array.steady(arguments)
        check_once(self.array, compiled, arguments)
        self._check_same(compiled.program)
        return compiled, split(compiled.program, [shard.last for shard in self._shards])

    def _check_same(self, program: Program) -> None:
        """Raise PlanError if the operators differ from the first program's, since shards are ranges of operators."""
        targets = [node.target for node in operators(program)]
        if self._operators is None:
            self._operators = targets
        elif self._operators != targets:
            raise PlanError(
                f"task {self._name!r}: a minibatch of another kind than the first needs another program, whose "
                f"operators differ ({len(targets)} instead of {len(self._operators)}); give minibatches of one shape, "
                "for example with drop_last=True"
            )


def evaluation_parts(
    array: FusedModule, names: Mapping[str, str], held: Sequence[frozenset[str]], minibatch: Minibatch
) -> tuple[Compiled, tuple[Part, ...]]:
    """Capture the program in eval mode, and cut it so that each shard uses what it holds in training, see `match_cuts`.

    The mode of the array is restored.
    """
    with array.evaluating():
        compiled = array.compiled(minibatch.arguments_for(array))
    return compiled, split(compiled.program, match_cuts(compiled.program, names, held))


class Stream:
    """The minibatches of a loader in all epochs, for the array of ``members``.

    Args:
        planned: the largest inputs that the plan allows.
        devices: the devices that may compute the array.
        turn: held while a minibatch is read. Workers of a DataLoader read from copies, so they need none.
    """

    def __init__(
        self,
        task: Task,
        loader: Iterable[Any],
        members: Sequence[int],
        loss: PerModel,
        programs: CutPrograms,
        planned: Shapes,
        devices: Sequence[torch.device],
        turn: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._task = task
        self._loader = loader
        self._members = members
        self._loss = loss
        self._programs = programs
        self._planned = planned
        self._devices = devices
        self._pins = any(backend(device).pins for device in devices)
        self._turn = turn if turn is not None and not getattr(loader, "num_workers", None) else nullcontext()
        self._open: Iterator[Any] | None = None
        self._resumed: Position | None = None
        self._began: Position | None = None
        self._yielded_count = 0
        self._stopped = False
        self._items = self._read()
        self._reader = Reader(self._items, f"{task.name} reads", lambda: end_workers(self._open))
        self._latest: Minibatch
        self._recipes: dict[Any, Recipe] = {}

    def next(self, drawing: AbstractContextManager[None] | None = None) -> Batch:
        """Return the next minibatch. Raises PlanError if an epoch was shorter or longer than the loader's length."""
        if type(self._loader) in (list, tuple):
            # A list never waits and draws no random numbers, so reading it here is cheaper than in another thread.
            if self._stopped:
                raise CancelledError
            self._latest = minibatch = next(self._items)
        else:
            self._latest = minibatch = self._reader.next(_within(self._turn, drawing or nullcontext()))
        key = minibatch.key
        if self._pins:
            # Pin once, for all units that copy these tensors.
            minibatch = Minibatch(minibatch.arguments.mapped(_pinned), _map_tensors(minibatch.target, _pinned))
        return Batch(tuple(_detached(value) for value in minibatch.arguments.values), minibatch.target, key, minibatch)

    @property
    def position(self) -> Position:
        """Return the position in the loader. Between minibatches only."""
        if self._began is None:
            # Nothing was read in this run, but maybe in the run that it resumes.
            return self._resumed or Position.unread(self._loader)
        return self._began.at(self._yielded_count, self._loader)

    def resume(self, position: Position) -> None:
        """Start reading at ``position``. Call it before the first `next`."""
        self._resumed = position

    def close(self) -> None:
        """Stop reading, and end the loader's processes and threads.

        After `stop`, the thread of a loader that hangs is abandoned.
        """
        self._reader.close()

    def stop(self) -> None:
        """Let `next`, also a waiting one, raise CancelledError."""
        self._stopped = True
        self._reader.stop()

    def find(self, batch: Batch) -> Recipe | None:
        """Return the recipe for batches like this one, or None."""
        return self._recipes.get(batch.key)

    def make(self, batch: Batch) -> Recipe:
        """Return a new recipe for batches like this one, the latest from `next`."""
        return self.prepare(self._latest)

    def prepare(self, minibatch: Minibatch) -> Recipe:
        """Capture the program, check the loss, and return the recipe. Raises FusionError or PlanError."""
        for shape, planned in zip(minibatch.shapes, self._planned, strict=False):
            if shape[:1] > planned[:1]:
                raise PlanError(
                    f"task {self._task.name!r}: a minibatch has {shape[0]} samples, but the plan counts with "
                    f"{samples((planned,))}, those of the first minibatch: let the first one of each loader be the "
                    "largest, or give a list of minibatches"
                )
        compiled, parts = self._programs(minibatch)
        program = compiled.program
        loss = self._loss.state()
        key = IdentityRef(program), loss, minibatch.key, tuple(self._devices)
        if loss is None or key not in _draws_of_losses:
            sizes = symbol_sizes(program, minibatch.shapes)
            for device in self._devices:
                self._check_loss(program, _examples(program, sizes, device), minibatch.target)
                # Wait, so that asynchronous errors of the device are raised here and not in a later unit.
                backend(device).wait()
            if len(_draws_of_losses) == MAX_LOSSES:
                _draws_of_losses.clear()
            _draws_of_losses[key] = not self._loss.programs or any(map(_draws, self._loss.programs))
        recipe = Recipe(
            parts,
            input_names(program),
            compiled.constants,
            lambda outputs, target: self._losses(program, outputs, target),
            random=_random(compiled) or _draws_of_losses[key],
            branching=program.members if compiled.opaque else None,
        )
        self._recipes[minibatch.key] = recipe
        return recipe

    def _read(self) -> Generator[Minibatch, None, None]:
        loader_length = length(self._loader)
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.random is None:
            resumed.restore(self._loader)
            resumed = None
        for epoch in range(0 if resumed is None else resumed.epoch, self._task.epochs):
            self._began = Position.at_epoch_start(epoch, self._loader) if resumed is None else resumed
            # Read to the very end, like a plain loop: a loader may draw random numbers there.
            with reading(self._loader) if resumed is None else rereading(self._loader, resumed) as self._open:
                read_count = self._yielded_count = 0 if resumed is None else resumed.given
                resumed = None
                for item in self._open:
                    read_count += 1
                    if read_count > loader_length:
                        break
                    self._yielded_count = read_count
                    yield Minibatch.of(self._task, item, self._members)
            if read_count != loader_length:
                count = "more" if read_count > loader_length else str(read_count)
                raise PlanError(
                    f"task {self._task.name!r}: the loader gave {count} minibatches in epoch {epoch}, but its length "
                    f"is {loader_length}: give one whose length is the number of its minibatches"
                )

    def _check_loss(self, program: Program, outputs: Sequence[Any], target: Any) -> None:
        """Raise PlanError if the loss fails, or its result has no gradient."""
        try:
            with torch.enable_grad():
                losses = self._losses(program, outputs, target)
        except HFusionError:
            raise
        except Exception as error:
            shapes = ", ".join(str(list(value.shape)) for value in outputs if isinstance(value, Tensor))
            raise PlanError(
                f"task {self._task.name!r}: the loss failed at its first call, with zeros of shape {shapes} as outputs "
                f"of {len(self._members)} members: {type(error).__name__}: {error}"
            ) from error
        if not losses.is_floating_point() or not losses.requires_grad:
            raise PlanError(
                f"task {self._task.name!r}: the losses, of dtype {losses.dtype}, have no gradient, so nothing would be "
                "trained: let the loss compute floating-point numbers from the outputs, without detach() or item()"
            )

    def _losses(self, program: Program, outputs: Sequence[Any], target: Any) -> Tensor:
        device = next(leaf.device for leaf in pytree.tree_leaves(list(outputs)) if isinstance(leaf, Tensor))
        value = outputs[0] if program.out_spec.is_leaf() else pytree.tree_unflatten(list(outputs), program.out_spec)
        losses = self._loss(value, _map_tensors(target, lambda tensor: tensor.to(device, non_blocking=True)))
        if not isinstance(losses, Tensor) or losses.shape != (len(self._members),):
            form = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise PlanError(
                f"task {self._task.name!r}: the losses of {len(self._members)} members have {form}; the loss must "
                "reduce to one number per member, for example with reduction='mean'"
            )
        return losses


@contextmanager
def _within(*outer: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in outer:
            stack.enter_context(context)
        yield


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to all tensors of a nested value, including those in stacked inputs."""
    if isinstance(value, Tensor):
        return change(value)

    def map_leaf(leaf: Any) -> Any:
        if is_stacked(leaf):
            return StackedInput(change(leaf.tensor))
        if isinstance(leaf, Ragged):
            return leaf.map(change)
        return change(leaf) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(map_leaf, value, is_leaf=is_stacked)


def _pinned(tensor: Tensor) -> Tensor:
    """Return a pinned copy of a contiguous CPU tensor, for asynchronous copies. Return other tensors unchanged."""
    plain = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
    return tensor.pin_memory() if plain else tensor


def _examples(program: Program, sizes: SymbolSizes, device: torch.device) -> list[Any]:
    """Return zeros in the shapes of the program's outputs, to try the loss with."""
    (outputs,) = next(node for node in program.module.graph.nodes if node.op == "output").args
    assert isinstance(outputs, list | tuple)
    return [_zeros(node, program.members, sizes, device) if isinstance(node, fx.Node) else node for node in outputs]


def _zeros(node: fx.Node, members: int, sizes: SymbolSizes, device: torch.device) -> Any:
    example = node.meta.get("example")
    if isinstance(example, torch.SymFloat):
        return example.node.hint
    if not isinstance(example, Tensor):
        return concrete([example], sizes)[0] if isinstance(example, torch.SymInt) else example
    shape = concrete(example.shape, sizes)
    stacked = shape if node.meta.get("layout") is Layout.SHARED else (members, *shape)
    zeros = torch.zeros(stacked, dtype=example.dtype, device=device)
    return zeros.requires_grad_() if example.is_floating_point() or example.is_complex() else zeros


def _random(compiled: Compiled) -> bool:
    """Return whether the program draws random numbers, or runs code that may."""
    return bool(compiled.opaque) or _draws(compiled.program)


def _draws(program: Program) -> bool:
    return any(draws_numbers(node.meta.get("origin", node)) for node in operators(program))

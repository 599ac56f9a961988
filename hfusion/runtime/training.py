"""The units of one task: forward, backward and update of a shard on a device, bit for bit as for the whole array.

- A forward runs with gradients enabled, as in plain training, since kernels are chosen by it. A shard that will be
  recomputed keeps no activations (activation checkpointing, Chen et al., arXiv:1604.06174).
- Recomputation starts from the same values, random state and buffers; what it writes into buffers is dropped.
- Gradients of a value are summed in autograd's order, latest use first: the sum from later shards enters the backward
  of an earlier shard as a root, and roots come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from threading import Condition
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hfusion.core.gradient_usage import absent_rows, exclude, mark_absent, never_reached, watched
from hfusion.core.membership import Membership, mark
from hfusion.core.program import Kind, Part
from hfusion.core.tree import leaves, map_leaves
from hfusion.device.backend import Generators, backend
from hfusion.optim.clip import clip_factors, grad_norms, scale
from hfusion.runtime.task_state import Bundle, Move, TaskTensors, copy_now, restore, spill
from hfusion.schedule.actions import Section
from hfusion.schedule.plan import Phase, TaskPlan, Unit

# How minibatches of one kind are computed, and where both come from.


@dataclass(frozen=True)
class Recipe:
    """A recipe to compute batches of one kind.

    Attributes:
        parts: the parts of the program, one per shard.
        inputs: the names of the program's inputs.
        losses: ``losses(outputs, target)`` returns the losses ``[B]`` from the flat outputs of the last part.
        random: whether it may draw random numbers.
        branching: the number of members if they may use different parameters, otherwise None.
    """

    parts: tuple[Part, ...]
    inputs: tuple[str, ...]
    constants: Mapping[str, Tensor]
    losses: Callable[[Sequence[Any], Any], Tensor]
    random: bool
    branching: int | None = None

    @cached_property
    def _on_host(self) -> dict[str, Tensor]:
        return {}

    def constant(self, name: str, device: torch.device) -> Tensor:
        """Return a constant on a device, by a copy from the host."""
        if name not in self._on_host:
            constant = self.constants[name]
            pins = backend(device).pins and constant.device.type == "cpu"
            self._on_host[name] = constant.pin_memory() if pins else constant.to("cpu")
        return self._on_host[name].to(device, non_blocking=True)

    @cached_property
    def makers(self) -> dict[str, int]:
        """The index of the part that computes each value."""
        return {name: index for index, part in enumerate(self.parts) for name in part.gives}

    @cached_property
    def later(self) -> tuple[frozenset[str], ...]:
        """For each part, the values that later parts take."""
        return tuple(
            frozenset(name for part in self.parts[index:] for name in part.takes)
            for index in range(1, len(self.parts) + 1)
        )


class Source(Protocol):
    """A source of batches and their recipes. A batch has the flat ``inputs`` of the program, and a ``target``."""

    def next(self, drawing: AbstractContextManager[None]) -> Any:
        """Return the next minibatch. It may draw torch's random numbers, in any thread, inside ``drawing``."""

    def stop(self) -> None:
        """Cancel the wait for the next minibatch, by a CancelledError."""

    def find(self, batch: Any) -> Recipe | None:
        """Return the recipe for a batch like this one; None if there is none yet."""

    def prepare(self, batch: Any) -> Recipe:
        """Create the recipe for such batches. Must run while no other thread computes."""


# The units of a task.

# The kinds of borrowed tensors that are loaded for a unit. An update needs none. A forward copies borrowed buffers when
# it begins, since other shards may write to them while it is loaded.
_BORROWED = {
    Phase.FORWARD: frozenset({Kind.PARAMETER}),
    Phase.BACKWARD: frozenset({Kind.PARAMETER, Kind.BUFFER}),
    Phase.EVALUATE: frozenset({Kind.PARAMETER, Kind.BUFFER}),
    Phase.UPDATE: frozenset[Kind](),
}


@dataclass(frozen=True)
class _PartGraph:
    """A computed part with its autograd graph: leaves by name, and outputs; for the last part only ``losses [B]``."""

    inputs: Mapping[str, Any]
    params: Mapping[str, Tensor]
    outputs: Mapping[str, Any]
    losses: Tensor | None = None


def _gradients_by_backward(
    outputs: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Mapping[str, Tensor], inputs: Collection[str]
) -> list[Tensor | None]:
    """Return the gradients of ``leaves``, also where members' own code calls backward() in a backward.

    Reentrant checkpoints do so, and refuse torch.autograd.grad.
    """
    # A leaf's `grad` has the strides of the leaf, and not those with which autograd would go on.
    arrived: dict[str, list[Tensor]] = {key: [] for key in inputs}
    for key, grads in arrived.items():
        leaves[key].register_hook(grads.append)
    torch.autograd.backward(outputs, seeds)
    gradients = [arrived[k][0] if len(arrived.get(k, ())) == 1 else leaf.grad for k, leaf in leaves.items()]
    for leaf in leaves.values():
        # The members' code may hold the leaf.
        leaf.grad = None
    return gradients


class Training:
    """Executes the units of a spilled task. One unit runs at a time; loads and evictions run concurrently.

    Attributes:
        losses, evaluations: a tensor ``[B]`` per trained, or evaluated, minibatch so far.
        over: the task has ended early, so that no more units are computed.
        compiled: whether minibatches are compiled steps.
        scheduled: the plan whose units the engine schedules.
        generators: the generators of the task's random numbers. Use them between units only.
        idle: the rows of members that have stopped, which need not be computed.
        resumed_calls: the kinds of minibatches that were compiled in the run that this one resumes.
    """

    compiled = False

    def __init__(
        self,
        plan: TaskPlan,
        state: TaskTensors,
        names: Mapping[str, str],
        source: Source,
        evaluation: Source | None,
        clip: Tensor | None,
        seed: int,
    ) -> None:
        self.plan = self.scheduled = plan
        self.state = state
        self.losses: list[Tensor] = []
        self.evaluations: list[Tensor] = []
        self.over = False
        self.idle: frozenset[int] = frozenset()
        self.resumed_calls: set[str] = set()
        self._names = names
        self._source = source
        self._evaluation = evaluation
        self._clip = clip
        self.generators = Generators(seed)
        self._carried = plan.carried
        self._batch: Any
        self._recipe: Recipe
        self._boundary = BoundaryStore(pinned=state.pinned)
        self._saved: dict[int, _PartGraph] = {}
        self._drawn: dict[int, Generators] = {}
        self._buffer_snapshots: dict[int, dict[str, Tensor] | Bundle] = {}
        self._grads: dict[str, Tensor] = {}
        self._parked: Bundle | None = None
        self._started: set[str] = set()
        self._absent: dict[str, Tensor] = {}
        self._left_out: dict[str, Tensor] = {}
        self._norms: dict[str, Tensor] = {}
        # For the losses and the norms, when the last asynchronous copy to the host has arrived.
        self._marks: dict[str, torch.Event | None] = {}
        self._factors: Tensor | None = None
        # Called when a unit of a minibatch has ended, and to save the task after a unit if that is due.
        self.ended: Callable[[Unit], None] = lambda unit: None
        self.save: Callable[[], None] = lambda: None

    def units_after(self, steps: int) -> int:
        """Return the number of scheduled units that have run after ``steps`` minibatches."""
        return self.plan.unit_index_after(steps)

    def ran(self, unit: Unit) -> None:
        """Note that a scheduled unit and its optimizer step have been queued."""
        if unit.phase is not Phase.FORWARD:
            self._wait_for("losses")
        self.ended(unit)

    def _wait_for(self, name: str) -> None:
        """Wait for the last copy of this name to the host, if there is one."""
        if (mark := self._marks.pop(name, None)) is not None:
            mark.synchronize()

    @property
    def minibatches(self) -> int:
        """The number of minibatches computed so far. The latest losses may not be on the host yet."""
        return len(self.losses)

    def arrive(self) -> None:
        """Wait until the losses of all minibatches are on the host."""

    @property
    def known_calls(self) -> list[str]:
        """The kinds of minibatches that are compiled, or will be at the next one."""
        return []

    def stop(self) -> None:
        """Cancel the waiting for minibatches."""
        for source in (self._source, self._evaluation):
            if source is not None:
                source.stop()

    def load(self, unit: Unit, shard: int, sections: Collection[Section], device: torch.device) -> list[Move]:
        """Allocate a shard on a device; for a backward, also the inputs to recompute. Return the copies to make."""
        moves = self.state.load(shard, sections, device, _BORROWED[unit.phase])
        if unit.phase is Phase.BACKWARD and unit.shard == shard and shard not in self._saved:
            moves += self._boundary.load(shard, self._recipe.parts[shard].takes, device)
        return moves

    def run(self, unit: Unit, device: torch.device, gate: Gate) -> None:
        """Compute a unit whose shard is loaded."""
        if unit.shard == 0 and unit.phase is not Phase.BACKWARD:
            source = self._source if unit.phase is Phase.FORWARD else self._evaluation
            assert source is not None
            recipe = self._read(source, device, gate)
            self._boundary.inputs = dict(zip(recipe.inputs, self._batch.inputs, strict=True))
            self._boundary.makers = recipe.makers
        with gate.computing():
            if unit.phase is Phase.FORWARD:
                self._forward(unit.shard, device)
            elif unit.phase is Phase.BACKWARD:
                self._backward(unit, device)
            else:
                self._evaluate(unit.shard, device)

    def recompute(self, unit: Unit, device: torch.device, gate: Gate) -> None:
        """Recompute the forward of a shard for the backward that follows."""
        shard = unit.shard
        with gate.computing():
            inputs = self._boundary.entry(shard, self._recipe.parts[shard].takes, device)
            before = self._buffer_snapshots[shard]
            if isinstance(before, Bundle):
                before, moves = restore(before, list(before.values), device)
                copy_now(moves)
            with self._drawing(self._drawn[shard], device):
                self._saved[shard] = self._compute(shard, inputs, before, device)

    def update(self, unit: Unit, gate: Gate) -> None:
        """Do the optimizer step of the unit's shard."""
        with gate.computing():
            shard = unit.shard
            names = [name for name in self.state.shards[shard].trained if name in self._started]
            grads = {name: self._gradient(shard, name) for name in names}
            for name in names:
                mark_absent(grads[name], self._absent.pop(name, None))
            if self._clip is not None:
                self._clip_by_norm(grads, self._clip)
            if grads:
                self.state.update(shard, grads)
            self._started.difference_update(names)
            for name in names:
                self._grads.pop(f"own {name}", None)
            if self._is_last(shard):
                self._norms, self._factors = {}, None

    def put_away(self, shard: int, *, leave: bool) -> list[Move]:
        """Evict a shard; ``leave``: also all else that the task has on the device. Return the copies to make."""
        moves = self._boundary.put_away(shard)
        return moves + (self._leave() if leave else []) + self.state.evict(shard)

    def _leave(self) -> list[Move]:
        """Move values that live between units to the host."""
        moves: list[Move] = []
        self._boundary.leave()
        for shard, before in self._buffer_snapshots.items():
            if before and not isinstance(before, Bundle):
                self._buffer_snapshots[shard], more = spill(before, pinned=self.state.pinned)
                moves += more
        if self._grads:
            self._parked, more = spill(self._grads, pinned=self.state.pinned)
            moves += more
            self._grads = {}
        return moves

    def _is_last(self, shard: int) -> bool:
        return shard == len(self.plan.shards) - 1

    def _read(self, source: Source, device: torch.device, gate: Gate) -> Recipe:
        self._batch = source.next(self.generators.active(device))
        recipe = source.find(self._batch)
        if recipe is None:
            with gate.exclusive(), self.state.at_home():
                recipe = source.prepare(self._batch)
        self._recipe = recipe
        return recipe

    def _forward(self, shard: int, device: torch.device) -> None:
        part = self._recipe.parts[shard]
        buffers = sorted({self._names[name] for name in part.writes})
        self._refresh(shard)
        is_last = self._is_last(shard)
        if not is_last:
            self._buffer_snapshots[shard] = {name: self.state.tensor(shard, name).clone() for name in buffers}
            self._drawn[shard] = self.generators.copy()
        inputs = self._boundary.take(part.takes, device)
        # No backward follows a shard that will be recomputed, so autograd saves nothing for it.
        forgetting = nullcontext() if is_last else saved_tensors_hooks(lambda tensor: None, _never)
        with self._drawing(self.generators, device), forgetting:
            saved = self._compute(shard, inputs, {}, device)
        self.state.wrote(shard, buffers)
        if saved.losses is not None:
            self.losses.append(saved.losses.detach().to("cpu", non_blocking=True))
            self._marks["losses"] = backend(device).mark()
        if is_last:
            self._saved[shard] = saved
        self._boundary.keep(shard, saved.outputs, self._recipe.later[shard])

    def _refresh(self, shard: int) -> None:
        """Copy borrowed tensors again that other shards may have changed since this one was loaded."""
        kinds = (Kind.BUFFER, Kind.PARAMETER) if shard in self.plan.pinned else (Kind.BUFFER,)
        self.state.refresh(shard, [self._names[s.name] for s in self._recipe.parts[shard].keys if s.kind in kinds])

    def _evaluate(self, shard: int, device: torch.device) -> None:
        if shard in self.plan.pinned:
            self._refresh(shard)
        inputs = self._boundary.take(self._recipe.parts[shard].takes, device)
        with torch.no_grad(), self._drawing(self.generators, device):
            graph = self._compute(shard, inputs, {}, device)
        self.state.wrote(shard, [self._names[name] for name in self._recipe.parts[shard].writes])
        self._boundary.keep(shard, graph.outputs, self._recipe.later[shard])
        if graph.losses is not None:
            self.evaluations.append(graph.losses.cpu())
            for index in range(shard + 1):
                self._clean(index)

    def _compute(
        self, shard: int, inputs: dict[str, Any], buffers: Mapping[str, Tensor], device: torch.device
    ) -> _PartGraph:
        """Run a part on new leaves. ``buffers``: used in place of the shard's buffers of the same name."""
        part, params, keys = self._recipe.parts[shard], {}, []
        for slot in part.keys:
            if slot.kind is Kind.CONSTANT:
                keys.append(self._recipe.constant(slot.name, device))
                continue
            name = self._names[slot.name]
            tensor = buffers[name] if name in buffers else self.state.tensor(shard, name)
            if slot.kind is Kind.PARAMETER:
                tensor = self.state.leaf(name, tensor)
                params[name] = tensor
            keys.append(tensor)
        branching = self._recipe.branching
        if branching is not None:
            for leaf in tracked(inputs).values():
                mark(leaf, Membership("", branching, stacked=True))
        outputs = watched(part.on(device), branching)(*keys, *inputs.values())
        if not self._is_last(shard):
            return _PartGraph(inputs, params, dict(zip(part.gives, outputs, strict=True)))
        return _PartGraph(inputs, params, {}, self._recipe.losses(outputs, self._batch.target))

    def _backward(self, unit: Unit, device: torch.device) -> None:
        shard = unit.shard
        if self._parked is not None:
            parked, moves = restore(self._parked, list(self._parked.values), device)
            copy_now(moves)
            self._grads |= parked
            self._parked = None
        saved = self._saved.pop(shard)
        inputs = tracked(saved.inputs)
        leaves = {**inputs, **{f"param {name}": leaf for name, leaf in saved.params.items() if leaf.requires_grad}}
        ends = tracked(saved.outputs)
        before = {key: self._left_out.pop(key, None) for key in (*ends, *leaves)}
        later = self._grads.keys() & before.keys()
        roots = [(leaf, self._grads.pop(key)) for key, leaf in {**ends, **leaves}.items() if key in later]
        if saved.losses is not None and saved.losses.requires_grad:
            total = saved.losses.sum()
            total = total / self.plan.accumulate if self.plan.accumulate > 1 else total
            roots.append((total, torch.ones_like(total)))
        if roots and leaves:
            outputs, seeds = zip(*roots, strict=True)
            for key, leaf in ends.items():
                exclude(leaf, before[key])
            gradients: Sequence[Tensor | None]
            if self._recipe.branching is None:
                gradients = torch.autograd.grad(outputs, [*leaves.values()], seeds, allow_unused=True)
            else:
                with self._drawing(self.generators, device):
                    gradients = _gradients_by_backward(outputs, seeds, leaves, inputs)
            grads = {key: grad for key, grad in zip(leaves, gradients, strict=True) if grad is not None}
            for key in grads.keys() & inputs.keys():
                # The members that get no gradient for a part's input, neither here nor from later parts.
                rows, later_rows = never_reached(inputs[key]), before[key]
                if key in later:
                    rows = later_rows if rows is None or later_rows is None else rows & later_rows
                if rows is not None and rows.any():
                    self._left_out[key] = rows
            self._collect(shard, grads)
        self._note_norms(unit)
        self._clean(shard)

    def _note_norms(self, unit: Unit) -> None:
        """Keep the norms of a shard's gradients, if they are complete and will be clipped."""
        shard = unit.shard
        if self.plan.closes(unit.step) and self._clip is not None:
            for name in self.state.shards[shard].trained:
                if name in self._started and self._gradient(shard, name).numel():
                    norms = grad_norms(self._gradient(shard, name), len(self._clip))
                    # The last mark is waited for, once for all of these copies.
                    self._norms[name] = norms.to("cpu", non_blocking=True)
                    self._marks["norms"] = backend(norms.device).mark()

    def _collect(self, shard: int, grads: Mapping[str, Tensor]) -> None:
        """Store gradients: those of parameters that the shard owns, and those that earlier shards continue with."""
        added: dict[str, Tensor] = {}
        copied: dict[str, Tensor] = {}
        for name in self.state.shards[shard].trained:
            grad = grads.get(f"param {name}")
            if grad is None:
                continue
            # The rows that had no gradient in any minibatch since the last optimizer step.
            absent = absent_rows(grad)
            if name in self._started:
                before = self._absent.pop(name, None)
                absent = None if absent is None or before is None else absent & before
            if absent is not None:
                self._absent[name] = absent
            if self._carried:
                (added if name in self._started else copied)[name] = grad
                self.state.keep_gradient(shard, name)
            else:
                self._grads[f"own {name}"] = grad
            self._started.add(name)
        if added:
            torch._foreach_add_([self.state.gradient(shard, name) for name in added], list(added.values()))
        if copied:
            torch._foreach_copy_([self.state.gradient(shard, name) for name in copied], list(copied.values()))
        param_keys = {f"param {name}" for name in self.state.shards[shard].trained}
        self._grads |= {key: grad for key, grad in grads.items() if key not in param_keys}

    def _gradient(self, shard: int, name: str) -> Tensor:
        return self.state.gradient(shard, name) if self._carried else self._grads[f"own {name}"]

    def _clip_by_norm(self, grads: Mapping[str, Tensor], limits: Tensor) -> None:
        """Scale gradients in place so that the norms over all shards keep the limits."""
        if self._factors is None:
            if not self._norms:
                return
            self._wait_for("norms")
            each = [self._norms[name] for name in self.state.order if name in self._norms]
            norms = torch.linalg.vector_norm(torch.stack(each), 2.0, dim=0)
            self._factors = clip_factors(norms, limits)
        nonempty = [grad for grad in grads.values() if grad.numel()]
        factors = self._factors.to(nonempty[0].device, non_blocking=True) if nonempty else self._factors
        for grad in nonempty:
            scale(grad, factors)

    def _clean(self, shard: int) -> None:
        """Forget what was kept for this minibatch's backward of the shard."""
        self._boundary.clean(shard)
        self._drawn.pop(shard, None)
        self._buffer_snapshots.pop(shard, None)

    def _drawing(self, generators: Generators, device: torch.device) -> AbstractContextManager[None]:
        return generators.active(device) if self._recipe.random else nullcontext()


# The values that cross the cuts of a minibatch: kept on the device, and copied to the host until the backward.


class BoundaryStore:
    """Stores the values that parts exchange. One thread may load values for a shard while another computes.

    ``pinned``: use page-locked host memory.

    Attributes:
        inputs: the inputs of the present minibatch.
        makers: the part, by index, that computes each other value.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self.inputs: Mapping[str, Any] = {}
        self.makers: Mapping[str, int] = {}
        self._values: dict[str, Any] = {}
        self._fresh: dict[int, dict[str, Any]] = {}
        self._bundles: dict[int, Bundle] = {}
        self._entries: dict[int, dict[str, Any]] = {}

    def take(self, names: Sequence[str], device: torch.device) -> dict[str, Any]:
        """Return the values ``names`` on the device, as new autograd leaves."""
        values, moves = self._find(names, device)
        copy_now(moves)
        return detached(values)

    def load(self, shard: int, names: Sequence[str], device: torch.device) -> list[Move]:
        """Allocate the values ``names`` for the backward of ``shard``. Return the copies that fill them."""
        computed_names = [name for name in names if name not in self.inputs]
        self._entries[shard], moves = self._find(computed_names, device)
        return moves

    def entry(self, shard: int, names: Sequence[str], device: torch.device) -> dict[str, Any]:
        """Return the values ``names`` as new leaves: those that `load` prepared for a backward, if it was called."""
        loaded = self._entries.pop(shard, None)
        if loaded is None:
            return self.take(names, device)
        for tensor in leaves(loaded, Tensor):
            backend(device).share(tensor)
        # Inputs are copied here and not by `load`: memory belongs to the queue in which it was allocated.
        return detached({name: loaded[name] if name in loaded else self._of_batch(name, device) for name in names})

    def keep(self, shard: int, outputs: Mapping[str, Any], later: frozenset[str]) -> None:
        """Store the outputs of ``shard``. ``later``: names that later parts take, which stay on the device."""
        results = detached(outputs)
        if results:
            self._fresh[shard] = results
        values = {**self._values, **results}
        self._values = {name: value for name, value in values.items() if name in later}

    def put_away(self, shard: int) -> list[Move]:
        """Return the copies to the host when a shard leaves the device."""
        # Values loaded for a backward are unused if another task runs first.
        self._entries.pop(shard, None)
        fresh = self._fresh.pop(shard, None)
        if fresh is None:
            return []
        self._bundles[shard], moves = spill(fresh, pinned=self._pinned)
        return moves

    def leave(self) -> None:
        """Forget the values on the device, which the task leaves. Copies are on the host."""
        self._values = {}

    def clean(self, shard: int) -> None:
        """Forget the values that ``shard`` computed."""
        self._entries.pop(shard, None)
        self._bundles.pop(shard, None)
        self._values = {name: value for name, value in self._values.items() if self.makers.get(name) != shard}

    def _find(self, names: Sequence[str], device: torch.device) -> tuple[dict[str, Any], list[Move]]:
        """Return the values ``names`` on the device, and the copies that must be made before they are used."""
        # Read once: a unit may replace it while the next one is loaded.
        values = self._values
        results: dict[str, Any] = {}
        missing: dict[int, list[str]] = {}
        moves: list[Move] = []
        for name in names:
            if name in self.inputs:
                results[name] = self._of_batch(name, device)
            elif name in values:
                results[name] = values[name]
            else:
                missing.setdefault(self.makers[name], []).append(name)
        for maker, missing_names in missing.items():
            restored, copies = restore(self._bundles[maker], missing_names, device)
            results |= restored
            moves += copies
        return {name: results[name] for name in names}, moves

    def _of_batch(self, name: str, device: torch.device) -> Any:
        """Return an input of the minibatch on the device."""
        return map_leaves(self.inputs[name], Tensor, lambda tensor: tensor.to(device, non_blocking=True))


def detached(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with tensors detached from their graph, as new leaves with the same ``requires_grad``."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return {name: map_leaves(value, Tensor, leaf) for name, value in values.items()}


def tracked(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that require a gradient, by the name of their value and their index in it."""
    return {
        f"{name} #{index}": leaf
        for name, value in values.items()
        for index, leaf in enumerate(leaves(value, Tensor))
        if leaf.requires_grad
    }


def _never(packed: object) -> Tensor:
    raise AssertionError("a graph that kept nothing was walked")


# The lock between computing and capturing: torch.export patches state of the whole process.


class Gate:
    """A lock: either many threads compute, or one captures, as torch.export patches state of the whole process."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._computing = 0
        self._exclusive = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive)
            self._computing += 1
        try:
            yield
        finally:
            with self._changed:
                self._computing -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive and not self._computing)
            self._exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._exclusive = False
                self._changed.notify_all()

"""Trace forward, losses and gradients of an array as one graph of ATen operators, which runs without autograd.

The graph is traced by `torch.fx.experimental.proxy_tensor.make_fx` with the sizes of the batch as symbols, and passed
directly to Inductor, without Dynamo: the caller checks what Dynamo would guard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from hfusion.compiler.arguments import BATCHED, Arguments, describe_leaf, is_tensors
from hfusion.compiler.compiled_program import BoundProgram, Location, of_rows
from hfusion.core.calls import StackedInput, is_stacked
from hfusion.core.layout import Layout
from hfusion.core.member_random import seeded
from hfusion.core.program import describe_graph
from hfusion.core.stages import stage
from hfusion.passes.candidates import by_name, draws_numbers
from hfusion.passes.check import check_links
from hfusion.passes.inductor_rewrites import (
    DECOMPOSITIONS,
    batch_member_loops,
    inline_constants,
    onehot,
    sink_transposes,
    transpose_products,
)
from hfusion.passes.side_effects import EXPECT
from hfusion.passes.views import writes
from hfusion.torch_private.dispatch_modes import FakeTensorMode, enable_python_dispatcher, with_dynamic_dims
from hfusion.torch_private.replaced_functions import silence_tracers


@dataclass(frozen=True, eq=False)
class StepCall:
    """The arguments of a step; ``idle``: members whose results are not needed."""

    inputs: Arguments
    target: Arguments
    idle: frozenset[int] = frozenset()

    @property
    def leaves(self) -> list[Any]:
        """The tensors among the arguments, stacked ones in their wrappers."""
        return [leaf for leaf in (*self.inputs.leaves, *self.target.leaves) if isinstance(leaf, BATCHED)]

    def batch(self) -> list[Tensor]:
        """Return the tensors that a traced step takes, made contiguous."""
        return [(leaf.tensor if isinstance(leaf, StackedInput) else leaf).contiguous() for leaf in self.leaves]

    def mapped(self, fn: Callable[[Any], Any]) -> StepCall:
        """Return the call with ``fn`` applied to each leaf."""
        inputs, target = (Arguments(tuple(map(fn, a.leaves)), a.spec) for a in (self.inputs, self.target))
        return StepCall(inputs, target)

    def of_rows(self, rows: range) -> StepCall:
        """Return the call for an array of the members ``rows`` only."""

        def slice_leaf(leaf: Any) -> Any:
            return StackedInput(leaf.tensor[rows.start : rows.stop]) if isinstance(leaf, StackedInput) else leaf

        return self.mapped(slice_leaf)

    @property
    def stacked(self) -> list[bool]:
        """The tensors that have a row for every member."""
        return list(map(is_stacked, self.leaves))

    @property
    def ragged(self) -> bool:
        """True if members' batches differ in size, which programs do not support."""
        return bool(self.inputs.ragged or self.target.ragged)

    @property
    def text(self) -> str:
        """The dtypes and shapes of the arguments, such as ``f32[32,64], i64[32]``."""
        leaves = (*self.inputs.leaves, *self.target.leaves)
        return ", ".join(map(describe_leaf, filter(is_tensors, leaves)))


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The traced step.

    It writes to buffers in place, never to parameters.

    Attributes:
        module: takes the tensors of the array, then contiguous ones of inputs and target, then seeds. Returns the
            losses ``[B]`` and the gradients of the tensors ``trained``, contiguous and without shared memory.
        trained: indices of the array's tensors that get a gradient.
        tensors, batch: fake tensors of the array, and of inputs and target.
        seeds: one fake tensor, of an integer per member, if the step draws random numbers on a CPU; else empty.
    """

    module: fx.GraphModule
    trained: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    batch: tuple[Tensor, ...]
    seeds: tuple[Tensor, ...] = ()

    @property
    def examples(self) -> tuple[Tensor, ...]:
        return (*self.tensors, *self.batch, *self.seeds)


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors that a step takes, without duplicates. ``stacked``: which have a row for every member.

    If forward or the loss has assertions, the last tensor holds one bool per member: whether any of them failed.
    """

    tensor_refs: tuple[Location, ...]
    stacked: tuple[bool, ...]

    @staticmethod
    def of(*sources: BoundProgram) -> Tensors:
        unique: dict[int, tuple[Location, bool]] = {}
        for source in sources:
            for (holder, name), layout in zip(source.locations, source.layouts, strict=True):
                unique.setdefault(id(holder[name]), ((holder, name), layout is Layout.STACKED))
        if any(source.compiled.checks for source in sources):
            failed = sources[0].failed
            if not failed:
                device = next((holder[name].device for (holder, name), _ in unique.values()), None)
                failed["members"] = torch.zeros(sources[0].compiled.program.members, dtype=torch.bool, device=device)
            unique[id(failed["members"])] = (failed, "members"), True
        return Tensors(
            tuple(tensor_ref for tensor_ref, _ in unique.values()), tuple(stacked for _, stacked in unique.values())
        )

    def all(self) -> list[Tensor]:
        """Return the current tensors."""
        return [holder[name] for holder, name in self.tensor_refs]

    @property
    def members(self) -> int:
        """Number of members of the array."""
        return next(len(h[n]) for (h, n), stacked in zip(self.tensor_refs, self.stacked, strict=True) if stacked)

    def of_rows(self, rows: range) -> list[Tensor]:
        """Return the tensors of the members ``rows``: detached rows of stacked tensors, and whole shared tensors."""
        pairs = zip(self.all(), self.stacked, strict=True)
        return [
            tensor.detach()[rows.start : rows.stop].requires_grad_(tensor.requires_grad) if stacked else tensor
            for tensor, stacked in pairs
        ]


@dataclass(frozen=True, eq=False)
class StepSource:
    """Forward and loss of all members, or of some, and a call like those that a step of these members serves.

    Attributes:
        tensors: the tensors of the whole array, to which the programs are bound.
        values: the tensors, or the rows of them, that the step takes.
    """

    forward: BoundProgram
    loss: BoundProgram
    call: StepCall
    tensors: Tensors
    values: Sequence[Tensor]

    @staticmethod
    def of(forward: BoundProgram, loss: BoundProgram, call: StepCall, rows: range | None = None) -> StepSource:
        """Return the source for the members ``rows``; None for all."""
        tensors = Tensors.of(forward, loss)
        if rows is None:
            return StepSource(forward, loss, call, tensors, tensors.all())
        # Lowered for these members only, and still bound to the tensors of the whole array.
        its_forward, its_loss = (replace(bound, compiled=of_rows(bound.compiled, rows)) for bound in (forward, loss))
        return StepSource(its_forward, its_loss, call.of_rows(rows), tensors, tensors.of_rows(rows))


def trace(source: StepSource) -> StepGraph:
    """Trace the step of ``source`` for calls like its own. Dims that are dynamic in its programs stay dynamic.

    An active autocast applies to forward and loss; backward follows their dtypes. Raises ProgramMismatch if the
    programs are not valid for the sizes of this call, and any error of tracing.
    """
    # Imported late: it imports sympy.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    forward, loss, call, tensors = source.forward, source.loss, source.call, source.tensors
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake_tensors = [mode.from_tensor(tensor, static_shapes=True) for tensor in source.values]
    count = len(fake_tensors)
    batch = [
        _fake(mode, k, leaf, dims)
        for k, (leaf, dims) in enumerate(zip(call.leaves, captured_dims(forward, loss, call), strict=True))
    ]
    _check(forward, refilled(call, batch).inputs.shapes)
    trained = [k for k, fake in enumerate(fake_tensors) if fake.requires_grad]
    ids = [id(holder[name]) for holder, name in tensors.tensor_refs]
    rows, seeds = forward.compiled.program.members, []
    nodes = [node for program in (forward, loss) for node in program.compiled.graph.nodes]
    if all(tensor.device.type == "cpu" for tensor in source.values) and any(map(draws_numbers, nodes)):
        seeds = [mode.from_tensor(torch.zeros(rows, dtype=torch.int64, device="cpu"), static_shapes=True)]
    reached: list[int] = []

    def step(*inputs: Tensor) -> list[Tensor]:
        held = dict(zip(ids, inputs[:count], strict=True))
        checks: list[Tensor] = []
        traced_call = refilled(call, inputs[count : count + len(batch)])
        with seeded(inputs[-1] if seeds else None):
            outputs = _run(forward, held, traced_call.inputs.values, checks)
            shapes = [out.shape[1:] if isinstance(out, Tensor) else () for out in outputs]
            _check(loss, [*shapes, *traced_call.target.shapes])
            # The loss takes the flattened outputs, then the flattened target.
            losses: Tensor = _run(loss, held, [*outputs, *traced_call.target.values], checks)[0]
        if checks:
            inputs[count - 1].copy_(torch.stack([failed.expand(rows) for failed in checks]).any(0))
        with torch.autocast(losses.device.type, enabled=False):
            grads = torch.autograd.grad(losses.sum(), [inputs[k] for k in trained], allow_unused=True)
        reached.extend(k for k, grad in zip(trained, grads, strict=True) if grad is not None)
        return _separate(inputs, [losses.detach(), *(grad for grad in grads if grad is not None)])

    # torch 2.11 misdescribes the tensor that the fused kernel of float64 attention on a CPU saves for backward.
    wide = any(tensor.dtype is torch.float64 for tensor in source.values)
    attention = sdpa_kernel(SDPBackend.MATH) if wide else nullcontext()
    with silence_tracers(), torch.enable_grad(), attention, mode, enable_python_dispatcher():
        # Each was measured to be faster on a CPU; they are untested on other devices.
        on_cpu = source.values[0].is_cpu
        decompositions = dict(DECOMPOSITIONS) if on_cpu else {}
        module = make_fx(step, decomposition_table=decompositions)(*fake_tensors, *batch, *seeds)
        for rewrite in (sink_transposes, transpose_products, onehot, inline_constants) if on_cpu else ():
            module = rewrite(module)
            name, graph = forward.compiled.program.name, module.graph
            title = f"the step of {name}, {rewrite.__name__}"
            stage(name, f"step {rewrite.__name__}", partial(describe_graph, title, graph), partial(check_links, graph))
    return StepGraph(module, tuple(reached), tuple(fake_tensors), tuple(batch), tuple(seeds))


class ProgramMismatch(Exception):
    """The programs from which a step is traced are not valid for the sizes of this call."""


def _check(source: BoundProgram, shapes: Sequence[Sequence[Any]]) -> None:
    """Apply a program's size guards to the traced step: comparing symbols records guards there."""
    with disable_proxy_modes_tracing():
        if not source.compiled.guards(shapes):
            raise ProgramMismatch


def captured_dims(forward: BoundProgram, loss: BoundProgram, call: StepCall) -> list[frozenset[int]]:
    """Return, for each tensor of a call, the dynamic dims in the captures, counted without the members' dim."""
    outputs = forward.compiled.program.out_spec.num_leaves
    dims = (*forward.compiled.dims, *loss.compiled.dims[outputs:])
    leaves = (*call.inputs.leaves, *call.target.leaves)
    return [leaf_dims for leaf, leaf_dims in zip(leaves, dims, strict=True) if isinstance(leaf, BATCHED)]


def _fake(mode: FakeTensorMode, position: int, leaf: Any, dims: Collection[int]) -> Tensor:
    """Return a fake input whose first dim and ``dims``, as a member sees them, have symbolic sizes."""
    # A copy, because the storage offset of a row in its stack would become a guard.
    tensor = (leaf.tensor if is_stacked(leaf) else leaf).detach().clone(memory_format=torch.contiguous_format)
    first = 1 if is_stacked(leaf) else 0
    dynamic = {first + dim for dim in (0, *dims)}
    return with_dynamic_dims(mode, tensor, [dim in dynamic for dim in range(tensor.dim())], f"input_{position}")


def refilled(call: StepCall, tensors: Sequence[Tensor]) -> StepCall:
    """Return the call with its tensors replaced, in order, by ``tensors``."""
    fresh = iter(tensors)

    def replace_leaf(leaf: Any) -> Any:
        if isinstance(leaf, StackedInput):
            return StackedInput(next(fresh))
        return next(fresh) if isinstance(leaf, Tensor) else leaf

    return call.mapped(replace_leaf)


def _run(
    source: BoundProgram, held: Mapping[int, Tensor], leaves: Sequence[Any], checks: list[Tensor]
) -> Sequence[Any]:
    """Return the outputs of a program. For each assertion, append to ``checks`` if it fails: one bool or ``[B]``."""

    def check(condition: Tensor, truth: bool, line: str) -> None:
        checks.append(condition != truth)

    code = batch_member_loops(source.compiled.program.module)
    for node in code.graph.find_nodes(op="call_function", target=EXPECT):
        node.target = check
    code.recompile()
    results: Sequence[Any] = code(*[held[id(h[n])] for h, n in source.locations], *leaves)
    return results


def _separate(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous outputs that share no memory with inputs or each other, since callers may write to them."""
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    results = []
    for output in outputs:
        result = output.contiguous()
        if result.untyped_storage()._cdata in storages:
            result = result.clone(memory_format=torch.contiguous_format)
        storages.add(result.untyped_storage()._cdata)
        results.append(result)
    return results


def written_inputs(graph: fx.Graph) -> frozenset[int]:
    """Return indices of inputs that operators may write to, also through views: all that a written node depends on."""
    pending: list[fx.Node] = []
    for node in graph.nodes:
        if writes(node):
            named = by_name(node.target, node.args, node.kwargs)
            for argument in node.target._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    fx.map_arg(named[argument.name], pending.append)
    reached: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += node.all_input_nodes
    return frozenset(index for index, node in enumerate(graph.find_nodes(op="placeholder")) if node in reached)

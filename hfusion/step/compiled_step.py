"""Compiled steps: one program for the whole array, or one for a block of members, called once per block.

Convolutions on a CPU are faster in a loop over members, but a program for the whole array would compile them B times.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, fx, nn

from hfusion.capture.dynamic_sizes import recurrent
from hfusion.compiler.bound_program import BoundProgram, Location
from hfusion.compiler.graph_text import Unwritable
from hfusion.core.differences import distance, norm
from hfusion.core.member_random import draws_random, new_seeds
from hfusion.core.program import describe_value
from hfusion.core.row_indices import blocks_of
from hfusion.device.backend import random_states_kept
from hfusion.device.team import Team
from hfusion.ops.rule import hint
from hfusion.passes.align import scalars
from hfusion.step import program_cache
from hfusion.step.compile_limits import TooManyOperators, Unprofitable, check_open, check_operators
from hfusion.step.compile_request import CompileRequest, write_request
from hfusion.step.program_cache import KeptGraph, NoProgram, StepPrograms
from hfusion.step.step_graph import StepCall, StepGraph, Tensors, bound_rows, trace, trace_rows, written_inputs
from hfusion.torch_private.cpp_block_entry import with_row_entries
from hfusion.torch_private.cpp_entry import entry_of
from hfusion.torch_private.inductor_patches import quick_inductor
from hfusion.torch_private.inductor_settings import compile_graph
from hfusion.torch_private.tracer_warnings import silence_tracers

# The most looped calls of a forward that are compiled as one program: with 32, a CNN took 1.3 times as long.
MAX_LOOPED_CALLS = 16
# The most programs of one step, if members differ in scalars.
MAX_KINDS = 4


Run: TypeAlias = Callable[..., Sequence[Tensor]]


class StepProgram(Protocol):
    """A compiled step. It is valid for calls of its captured forward and loss whose sizes pass ``fits``."""

    @property
    def how(self) -> str: ...
    @property
    def team(self) -> Team | None:
        """The threads that it runs on, besides torch's."""

    def fits(self, call: StepCall) -> bool: ...
    def step(self, call: StepCall) -> Tensor:
        """Write gradients and buffers, and return the losses ``[B]``."""


@dataclass(frozen=True, eq=False)
class FusedStep:
    """One program for all members. ``params``: all parameters, including those without a gradient."""

    graph: StepGraph | KeptGraph
    run: Run
    tensors: Tensors
    params: tuple[Location, ...]
    team: Team | None = None

    @property
    def operators(self) -> Sequence[Any]:
        return self.graph.operators

    @property
    def how(self) -> str:
        return f"one program of {len(self.operators)} operators"

    def fits(self, call: StepCall) -> bool:
        return self.graph.fits(call.batch())

    def step(self, call: StepCall) -> Tensor:
        clear(self.params)
        tensors = self.tensors.all()
        with torch.no_grad():
            seeds = [new_seeds(self.tensors.members)] if self.graph.seeded else []
            losses, *grads = self.run(*tensors, *call.batch(), *seeds)
        for index, grad in zip(self.graph.trained, grads, strict=True):
            tensors[index].grad = grad
        return losses


@dataclass(frozen=True, eq=False)
class PerMemberStep:
    """One program for every kind of block of ``size`` members, called once per block; block k runs ``kinds[k]``.

    The last block may be smaller. Blocks of idle members are skipped: their losses are NaN, their gradients 0.
    """

    graphs: tuple[StepGraph | KeptGraph, ...]
    runs: tuple[Run, ...]
    kinds: tuple[int, ...]
    size: int
    tensors: Tensors
    params: tuple[Location, ...]
    team: Team | None = None

    @property
    def operators(self) -> Sequence[Any]:
        return [operator for graph in self.graphs for operator in graph.operators]

    @property
    def how(self) -> str:
        count = len(self.graphs[0].operators)
        programs = "one program" if len(self.runs) == 1 else f"{len(self.runs)} programs"
        sizes = list(dict.fromkeys(len(rows) for rows in self.blocks))
        unit = "member" if self.size == 1 else f"{self.size}" if len(sizes) == 1 else "block"
        subject = "a member" if self.size == 1 else f"{' and '.join(map(str, sizes))} members"
        return f"{programs} of {count} operators for {subject}, called once per {unit}"

    @property
    def seeded(self) -> bool:
        """True if its programs take seeds for random numbers."""
        return self.graphs[0].seeded

    @property
    def trained(self) -> tuple[int, ...]:
        """The indices of the tensors that get a gradient."""
        return self.graphs[0].trained

    @property
    def blocks(self) -> list[range]:
        """The members of each block."""
        return blocks_of(self.members, self.size)

    @property
    def members(self) -> int:
        return self.tensors.members

    def fits(self, call: StepCall) -> bool:
        firsts = [self.kinds.index(kind) for kind in range(len(self.graphs))]
        blocks = self.blocks
        pairs = zip(self.graphs, firsts, strict=True)
        return all(graph.fits(call.of_rows(blocks[first]).batch()) for graph, first in pairs)

    def step(self, call: StepCall) -> Tensor:
        clear(self.params)
        tensors = self.tensors.all()
        pairs = [*zip(tensors, self.tensors.stacked, strict=True), *zip(call.batch(), call.stacked, strict=True)]
        if self.seeded:
            pairs.append((new_seeds(self.members), True))
        columns = [t.detach().split(self.size) if stacked else (t,) * len(self.kinds) for t, stacked in pairs]
        active = call.wants(self.blocks)
        grads = [self._room(tensors[k], self.tensors.stacked[k] and all(active)) for k in self.trained]
        losses: list[Tensor] = []

        def take(rows: range, block_losses: Tensor, *block_grads: Tensor) -> None:
            losses.append(block_losses)
            stacks = [k for k, index in enumerate(self.trained) if self.tensors.stacked[index]]
            if stacks:
                torch._foreach_copy_(
                    [grads[k][rows.start : rows.stop] for k in stacks], [block_grads[k] for k in stacks]
                )
            for k in set(range(len(grads))).difference(stacks):
                grads[k] += block_grads[k]

        with torch.no_grad():
            # The gradients of a block are freed before the next one runs.
            for rows, kind, w, inputs in zip(self.blocks, self.kinds, active, zip(*columns, strict=True), strict=True):
                if w:
                    take(rows, *self.runs[kind](*inputs))
                else:
                    losses.append(torch.full((len(rows),), torch.nan, device="cpu"))
        for index, grad in zip(self.trained, grads, strict=True):
            tensors[index].grad = grad
        computed = next(block_losses for block_losses, w in zip(losses, active, strict=True) if w)
        return torch.cat([block_losses.to(computed) for block_losses in losses])

    @staticmethod
    def _room(tensor: Tensor, filled: bool) -> Tensor:
        """Allocate a gradient; ``filled``: all of it will be overwritten, so it need not be zeroed."""
        allocate = torch.empty_like if filled else torch.zeros_like
        return allocate(tensor.detach(), memory_format=torch.contiguous_format)


@dataclass(eq=False)
class Library:
    """Cache of the programs of blocks, which arrays with any number of members share.

    ``count``: how many programs were compiled, including those of whole arrays.
    """

    blocks: dict[Any, tuple[StepGraph | KeptGraph, Run]] = field(default_factory=dict)
    count: int = 0


def clear(params: Sequence[Location]) -> None:
    # Frees the old gradients, so that new ones can reuse their memory, which is still in the cache.
    for holder, name in params:
        holder[name].grad = None


def compile_request_for(
    forward: BoundProgram, loss: BoundProgram, call: StepCall, size: int | None, autocast: Any, always: bool
) -> CompileRequest | None:
    """Return the request that identifies a step on disk and in other processes; None if it has none.

    ``size``: members per program, which arrays with other numbers of members can share; None for all.
    ``autocast``: the active autocast. ``always``: return a request even if programs are not cached on disk.
    """
    is_kept = always or program_cache.keeping()
    if not is_kept or any(tensor.device.type != "cpu" for tensor in Tensors.of(forward, loss).all()):
        return None
    try:
        return write_request(forward, loss, call, size, autocast)
    except Unwritable:
        return None


def compile_programs(
    forward: BoundProgram,
    loss: BoundProgram,
    call: StepCall,
    library: Library,
    kind: Any,
    size: int | None,
    compile_request: CompileRequest | None = None,
    folder: Path | None = None,
) -> StepPrograms:
    """Trace and compile the programs for calls like ``call``, and cache them on disk if there is an ``order``.

    ``kind``: what a program depends on in addition to forward and loss. ``size``: see `compile_request_for`.

    Raises:
        Unprofitable: compilation would not pay.
        Exception: any error of tracing or compiling.
    """
    try:
        programs = _compile(forward, loss, call, library, kind, size)
    except Unprofitable as error:
        if compile_request is not None:
            program_cache.keep(compile_request, NoProgram(str(error)), folder)
        raise
    if compile_request is not None:
        program_cache.keep(compile_request, programs, folder)
    return programs


def _compile(
    forward: BoundProgram, loss: BoundProgram, call: StepCall, library: Library, kind: Any, size: int | None
) -> StepPrograms:
    if recurrent(forward.compiled.graph) or recurrent(loss.compiled.graph):
        raise Unprofitable(
            "a program writes out every step of a recurrent layer, and it has a recurrent layer over a length that "
            "varies; give one length, padded, to have it compiled"
        )
    tensors, members = Tensors.of(forward, loss), forward.compiled.program.members
    looped = (forward if size is None else bound_rows(forward, range(min(size, members)))).looped_calls
    if looped > MAX_LOOPED_CALLS:
        size = 1
    try:
        if size is not None:
            return compile_blocks(forward, loss, call, tensors, library, kind, min(size, members))
        graph = trace(forward, loss, call)
        check_open(graph, forward, loss, call)
        check_operators(graph)
    except TooManyOperators:
        # Some calls are many operators, such as a recurrent layer's.
        if not looped or size == 1:
            raise
        return compile_blocks(forward, loss, call, tensors, library, kind, 1)
    library.count += 1
    return StepPrograms((graph,), (build(graph, tensors.all(), call.batch()),))


def step_of(
    programs: StepPrograms,
    forward: BoundProgram,
    loss: BoundProgram,
    call: StepCall,
    places: Sequence[Location],
    library: Library,
    kind: Any,
) -> FusedStep | PerMemberStep:
    """Return the step that runs compiled programs. Programs of blocks are added to ``library``."""
    params = tuple((holder, name) for holder, name in places if isinstance(holder[name], nn.Parameter))
    tensors = Tensors.of(forward, loss)
    if programs.size is None:
        return FusedStep(programs.graphs[0], programs.runs[0], tensors, params)
    ranges = blocks_of(forward.compiled.program.members, programs.size)
    for number in set(programs.kinds):
        rows = ranges[programs.kinds.index(number)]
        block_tensors, its_call = tensors.of_rows(rows), call.of_rows(rows)
        key = _block_key(forward, loss, scalars_of(forward, loss, rows), block_tensors, its_call, programs.size, kind)
        library.blocks.setdefault(key, (programs.graphs[number], programs.runs[number]))
    return PerMemberStep(programs.graphs, programs.runs, programs.kinds, programs.size, tensors, params)


def compile_blocks(
    forward: BoundProgram,
    loss: BoundProgram,
    call: StepCall,
    tensors: Tensors,
    library: Library,
    kind: Any,
    size: int,
) -> StepPrograms:
    """Return one program per kind of block of ``size`` members. Raises the errors of `compile_programs`."""
    ranges = blocks_of(forward.compiled.program.members, size)
    blocks = [scalars_of(forward, loss, rows) for rows in ranges]
    kinds = list(dict.fromkeys(blocks))
    if why := too_many_kinds(forward, loss, size):
        raise Unprofitable(why)
    entries = []
    for block_scalars in kinds:
        rows = ranges[blocks.index(block_scalars)]
        block_tensors, its_call = tensors.of_rows(rows), call.of_rows(rows)
        key = _block_key(forward, loss, block_scalars, block_tensors, its_call, size, kind)
        entry = library.blocks.get(key)
        if entry is None or not entry[0].fits(its_call.batch()):
            graph = trace_rows(forward, loss, call, rows)
            check_open(graph, forward, loss, call)
            check_operators(graph)
            library.count += 1
            entry = library.blocks[key] = graph, build(graph, block_tensors, its_call.batch())
        entries.append(entry)
    graphs, runs = zip(*entries, strict=True)
    return StepPrograms(graphs, runs, size, tuple(map(kinds.index, blocks)))


def too_many_kinds(forward: BoundProgram, loss: BoundProgram, size: int) -> str:
    """Return the reason against programs for blocks of ``size`` members; empty if there is none."""
    blocks = blocks_of(forward.compiled.program.members, size)
    count = len({scalars_of(forward, loss, rows) for rows in blocks})
    how = "one by one" if size == 1 else f"{size} at once"
    why = f"members run {how}, each kind by a program of its own, and scalars differ in {count} ways"
    return f"{why}; at most {MAX_KINDS} are worth it" if count > MAX_KINDS else ""


def _block_key(
    forward: BoundProgram,
    loss: BoundProgram,
    block_scalars: Any,
    tensors: Sequence[Tensor],
    call: StepCall,
    size: int,
    kind: Any,
) -> Any:
    """Return the key of a block's program in a `Library`."""
    return _origin(forward), _origin(loss), block_scalars, size, kind, traits(tensors), traits(call.batch())


def _origin(source: BoundProgram) -> Any:
    """Return a key that is equal for programs of one capture, and for equal captures without state of their own.

    A loss may have been captured several times, for arrays with other numbers of members.
    """
    compiled = source.compiled
    has_state = compiled.constants or compiled.opaque or any(scalars(compiled.graph))
    return compiled.origin if has_state else str(compiled.graph)


def traits(tensors: Sequence[Tensor]) -> Any:
    """Return the properties of tensors that a program assumes, except its dynamic sizes."""
    return tuple((tensor.dim(), tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors)


def scalars_of(forward: BoundProgram, loss: BoundProgram, rows: range) -> tuple[Any, ...]:
    """Return, for each of ``rows``, the scalars in which members differ; equal blocks share a program."""
    values = [v for compiled in (forward.compiled, loss.compiled) for v in scalars(compiled.graph)]
    return tuple(tuple(repr(per_member[member]) for per_member in values) for member in rows)


# Compile the graph of a step with Inductor, and check the program.


class WrongProgram(Exception):
    """A compiled program does not compute what its graph computes; the message names the difference."""


def build(graph: StepGraph, tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile ``graph.module`` with Inductor, and check it on ``tensors`` and ``batch``, copying written tensors.

    Raises WrongProgram if results are wrong, and whatever Inductor raises, such as without a C++ compiler, or its code.
    """
    # Imported late: it imports Inductor.
    from hfusion.step.aliased_writes import CopiesOfOverlaps

    kind = graph.examples[0].device.type
    # Calls of small operators take less time from C++ than from Python.
    options: dict[str, Any] = {"post_grad_custom_post_pass": CopiesOfOverlaps(), "cpp_wrapper": kind == "cpu"}
    with silence_tracers(), torch.no_grad(), torch.autocast(kind, enabled=False):
        with with_row_entries(), quick_inductor():
            run = compile_graph(graph.module, [e.detach() for e in graph.examples], options)
        written = written_inputs(graph.module.graph)

        def fresh() -> list[Tensor]:
            return [tensor.clone() if index in written else tensor for index, tensor in enumerate(tensors)]

        batch = [*batch, *(torch.zeros(seeds.shape, dtype=seeds.dtype, device="cpu") for seeds in graph.drawn)]
        # Programs draw from torch's global generator without the dispatcher, in any thread.
        with random_states_kept():
            results = _results(run, fresh(), batch)
        if not any(draws_random(node.target) for node in graph.module.graph.nodes):
            by_operator, generator = ByOperator(graph.module).run, torch.Generator().manual_seed(0)

            def nearby() -> list[Tensor]:
                return _results(by_operator, shaken(fresh(), generator), shaken(batch, generator))

            problem = disagreement(graph, results, _results(by_operator, fresh(), batch), nearby)
            if problem:
                raise WrongProgram(f"what torch.compile made of it is wrong: {problem}")
        entry = entry_of(run, len(tensors) + len(batch), len(results) - len(tensors))
        if entry is None:
            return run

        def rerun_program(call: Callable[..., Sequence[Tensor]]) -> list[Tensor]:
            with random_states_kept():
                return _results(call, fresh(), batch)

        # Without torch's wrappers, the program must give the same bits.
        difference = _difference(graph, rerun_program(entry), results)
        repeats = not difference or not _difference(graph, rerun_program(run), results)
    if not difference:
        return entry
    warnings.warn(_fallback(difference, repeats), stacklevel=2)
    return run


def _fallback(difference: str, repeats: bool) -> str:
    """Return the warning for a program that needs torch's wrappers; ``repeats``: whether with them its bits repeat."""
    why = (
        f"called past torch's wrappers, its program gives {difference}"
        if repeats
        else f"its program gives other bits each time, such as {difference}; an operator in it sums in no fixed order"
    )
    remedy = (
        "report it with the versions of torch and of the C++ compiler"
        if repeats
        else "torch.use_deterministic_algorithms(True) names the operator"
    )
    return f"a compiled step runs through torch's wrappers, in one part, exact but slower: {why}; {remedy}"


def _difference(graph: StepGraph, results: Sequence[Tensor], references: Sequence[Tensor]) -> str:
    """Describe the first difference between results of a step; empty if all bits are equal."""
    for name, actual, expected in zip(result_names(graph, len(results)), results, references, strict=True):
        if _same_bits(actual, expected):
            continue
        kinds = [
            f"{describe_value(tensor, None, 0)} of strides {list(tensor.stride())}" for tensor in (actual, expected)
        ]
        if kinds[0] != kinds[1]:
            return f"{name} as {kinds[0]} instead of {kinds[1]}"
        index = tuple(((actual != expected) & ((actual == actual) | (expected == expected))).nonzero()[0].tolist())
        return f"{actual[index].item()!r} instead of {expected[index].item()!r} in {name}, {kinds[0]}, at {list(index)}"
    return ""


def _results(run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a program, in host memory, and the tensors that it may have written.

    Outputs move to host memory because two programs are compared, but memory plans count one set of gradients.
    """
    return [*(output.cpu() for output in run(*tensors, *batch)), *tensors]


def _same_bits(result: Tensor, reference: Tensor) -> bool:
    if (result.shape, result.stride(), result.dtype) != (reference.shape, reference.stride(), reference.dtype):
        return False
    return bool(((result == reference) | ((result != result) & (reference != reference))).all())


# Check that a program compiled by Inductor computes the same as its graph.

# Perturbed inputs that are tried. A value that rounds to either side of zero changes its sign in about half of them.
_NEARBY = 12
# Inputs are perturbed by this power of the dtype's eps: 54 eps of float32, 3 of bfloat16. In a small CNN, whose program
# normalizes a batch differently, 8 eps were too few to flip a ReLU at zero that the program had flipped.
_OFF = 3 / 4
# A program may differ by this multiple of what the perturbed inputs change in the graph's own results.
_AS_MUCH = 2.0


class ByOperator(fx.Interpreter):
    """Interprets a graph for Inductor. Views become reshapes: Inductor ignores the strides that a view requires."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
        return super().call_function(torch.ops.aten.reshape.default if target in views else target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node. Operators that need exact strides get operands in the memory order of the trace."""
        if torch.Tag.needs_exact_strides not in getattr(n.target, "tags", ()):
            return super().run_node(n)
        before = {operand: self.env[operand] for operand in n.all_input_nodes}
        self.env |= {
            operand: _in_order(value, operand.meta["val"]) if isinstance(value, Tensor) else value
            for operand, value in before.items()
        }
        try:
            return super().run_node(n)
        finally:
            self.env |= before


def _in_order(tensor: Tensor, example: Tensor) -> Tensor:
    """Return ``tensor`` with its dims in the same memory order as those of ``example``."""
    strides = [hint(stride) or 0 for stride in example.stride()]
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.dim())])


def disagreement(
    graph: StepGraph, actual: Sequence[Tensor], expected: Sequence[Tensor], nearby: Callable[[], Sequence[Tensor]]
) -> str:
    """Describe the first result that differs from the graph's by more than rounding; empty if there is none.

    A program sums in another order, and may flip a ReLU at zero, so norms of differences are compared. A relative
    difference above the cube root of eps, 0.5% in float32, indicates an error, with two exceptions. Gradients that
    consist of rounding errors only, such as that of a bias before a BatchNorm, are compared with the largest gradient.
    And a result may differ as much as the graph's own result changes if its inputs are perturbed by rounding.

    Args:
        actual: results of the compiled program: losses, gradients, written tensors.
        expected: results of the graph for the same inputs.
        nearby: returns the graph's results for freshly perturbed inputs at each call.
    """
    rounding = max(_rounding(node.meta.get("val")) for node in graph.module.graph.nodes)
    largest = max((norm(tensor) for tensor in expected[1 : 1 + len(graph.trained)]), default=0.0)
    least = max(largest, 1.0) * rounding ** (2 / 3)
    distances = [_apart(result, other) for result, other in zip(actual, expected, strict=True)]
    norms = list(map(norm, expected))
    suspects = [k for k, size in enumerate(norms) if not distances[k] <= max(size * rounding ** (1 / 3), least)]
    if not suspects:
        return ""
    moved = dict.fromkeys(suspects, 0.0)
    for _ in range(_NEARBY):
        other = nearby()
        moved = {k: max(most, _apart(other[k], expected[k])) for k, most in moved.items()}
    names = result_names(graph, len(actual))
    for k, most in moved.items():
        if not distances[k] <= _AS_MUCH * most:
            kind = describe_value(expected[k], None, 0)
            return f"{names[k]}, {kind} of norm {norms[k]:.3g}, differs by {distances[k]:.3g}"
    return ""


def shaken(tensors: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return ``tensors`` with each number changed randomly by a few eps of its dtype; zeros stay zeros."""
    return [_shaken(tensor.detach(), _rounding(tensor) ** _OFF, generator) for tensor in tensors]


def _shaken(tensor: Tensor, most: float, generator: torch.Generator) -> Tensor:
    if not most:
        return tensor
    noise = 2 * torch.rand(tensor.shape, dtype=torch.float64, generator=generator, device="cpu") - 1
    return (tensor.cpu() * (1 + most * noise)).to(tensor.device, tensor.dtype)


def _apart(tensor: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference; 0 if the tensors are empty or ``reference`` is not finite."""
    if tensor is reference or not (tensor.numel() and torch.isfinite(reference).all()):
        return 0.0
    return distance(tensor, reference)


def result_names(graph: StepGraph, count: int) -> list[str]:
    """Return the names of a step's losses, gradients and written tensors for messages."""
    names = ["the losses", *(f"the gradient of tensor {k}" for k in graph.trained)]
    return [*names, *(f"tensor {k} after it" for k in range(count - len(names)))]


def _rounding(value: object) -> float:
    """Return eps of the dtype of a floating-point or complex tensor; 0 for everything else."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return torch.finfo(value.dtype).eps

"""Compiled steps: one program for the whole array, or one for a block of members, called once per block.

Convolutions on a CPU are faster in a loop over members, but a program for the whole array would compile them B times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from hfusion.capture.dynamic_sizes import recurrent
from hfusion.compiler.bound_program import BoundProgram, Location
from hfusion.compiler.graph_text import Unwritable
from hfusion.core.member_random import new_seeds
from hfusion.core.row_indices import blocks_of
from hfusion.device.team import Team
from hfusion.passes.align import scalars
from hfusion.step import program_cache
from hfusion.step.compile_limits import TooManyOperators, Unprofitable, check_open, check_operators
from hfusion.step.compile_request import CompileRequest, write_request
from hfusion.step.inductor_compile import build
from hfusion.step.program_cache import KeptGraph, NoProgram, StepPrograms
from hfusion.step.step_graph import StepCall, StepGraph, Tensors, bound_rows, trace, trace_rows

# The most looped calls of a forward that are compiled as one program: with 32, a CNN took 1.3 times as long.
MAX_LOOPED_CALLS = 16
# The most programs of one step, if members differ in scalars, and if they differ in submodules.
MAX_KINDS, MAX_STRUCTURES = 4, 8


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

"""Divide a step into blocks of members, and choose how many of the blocks run in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hfusion.compiler.bound_program import BoundProgram
from hfusion.core.layout import Layout
from hfusion.core.program import Kind
from hfusion.device.native import core_cache
from hfusion.device.openmp import torch_threads
from hfusion.device.team import library
from hfusion.ops.random import seedable
from hfusion.ops.rule import is_random
from hfusion.passes.candidates import by_name
from hfusion.passes.cost.price import Model
from hfusion.step.compiled_step import FusedStep, PerMemberStep, StepProgram, too_many_kinds
from hfusion.step.parallel_blocks import ParallelBlocksStep
from hfusion.step.recorded_step import recorded
from hfusion.torch_private.cpp_block_entry import CannotPartition

# With 8 members of MobileNetV2 per thread, blocks of 4 took as long as one block of 8, blocks of 2 1.25 times as long.
LEAST_BLOCK = 4


@dataclass(frozen=True)
class BlockPartition:
    """The division of a step into blocks of members.

    Attributes:
        size: members per block; None for all.
        threads: blocks that run in parallel.
        inner: torch threads that each block uses.
        why: the reason if blocks were requested to run in parallel and do not.
        direct: whether sequential blocks can run from C as parallel ones do, without Python and gradient copies.
    """

    size: int | None
    threads: int = 1
    inner: int = 1
    why: str = ""
    direct: bool = False

    @staticmethod
    def of(
        parts: int | str, forward: BoundProgram, loss: BoundProgram, size: int | None, most: int | None = None
    ) -> BlockPartition:
        """Divide a step into ``parts`` parallel blocks; ``"auto"``: one per torch thread.

        With 3 to 16 members of the benchmark's models on two cores, blocks took 1.06 of the time of all members
        together in the worst case, and half of it in the best. Beside other programs they are several times as fast,
        since an operator on all threads waits for the slowest.

        ``size``: members per block, None to choose it here. ``most``: the most members that all threads together may
        compute at a time, None for no limit.
        """
        members, cores = forward.compiled.program.members, torch.get_num_threads()
        threads = min(cores if isinstance(parts, str) else parts, members if most is None else most)
        if threads == 1:
            direct = not _obstacle(forward, loss)
            if size is None and cores == 1 and direct and not _without_threads():
                block = block_size(forward, 1)
                size = None if block >= members or too_many_kinds(forward, loss, block) else block
            return BlockPartition(_limited(size, most), inner=cores, direct=direct)
        block = block_size(forward, threads) if size is None else size
        if most is not None:
            block = min(block, most // threads)
        why = obstacle(forward, loss) or too_many_kinds(forward, loss, block)
        if why:
            return BlockPartition(_limited(size, most), why=why)
        return BlockPartition(block, threads, max(1, cores // threads))

    def set_threads(self) -> AbstractContextManager[None]:
        """Context manager: compile programs for ``inner`` threads. Inductor generates code for the current number."""
        return torch_threads(self.inner) if self.threads > 1 else nullcontext()

    def applied(self, program: FusedStep | PerMemberStep) -> StepProgram:
        """Return the step that runs ``program`` in these blocks. Raises CannotPartition if threads cannot call it."""
        if self.threads == 1:
            return self._in_turn(program)
        assert isinstance(program, PerMemberStep), program
        return ParallelBlocksStep(program, self.threads, self.inner)

    def _in_turn(self, program: FusedStep | PerMemberStep) -> StepProgram:
        if self.direct and isinstance(program, PerMemberStep) and len(program.blocks) > 1 and not _without_threads():
            with suppress(CannotPartition):
                return ParallelBlocksStep(program, 1, self.inner)
        return recorded(program)


def _limited(size: int | None, most: int | None) -> int | None:
    """Return the smaller of two numbers of members; None stands for all members."""
    return size if most is None else most if size is None else min(size, most)


def block_size(forward: BoundProgram, threads: int) -> int:
    """Return the members per block if ``threads`` blocks run in parallel.

    It is a thread's share of the members, or a whole fraction of it, so that the largest intermediate value of a block
    fits into a core's cache. With 64 members on two threads, blocks of 8 took 0.71 of the time of blocks of 32 in
    DCGAN's generator, and 0.83 in a small CNN; with 8 members of a transformer per thread, blocks of 4 took 0.89.
    Smaller blocks lose more by additional calls than they gain.
    """
    members = forward.compiled.program.members
    share = -(-members // threads)
    model = Model.of(forward.compiled.graph, 1)
    values = [size for node, size in model.bytes.items() if node.op == "call_function"]
    fit = max(LEAST_BLOCK, core_cache() // max([1, *values]))
    return -(-members // (threads * max(1, share // fit)))


def obstacle(forward: BoundProgram, loss: BoundProgram) -> str:
    """Return why blocks of a step cannot run in parallel; empty if they can."""
    return _obstacle(forward, loss) or _without_threads()


def _without_threads() -> str:
    team_library = library()
    return team_library if isinstance(team_library, str) else ""


def _obstacle(forward: BoundProgram, loss: BoundProgram) -> str:
    for source in (forward, loss):
        slots = [slot for slot in source.compiled.program.slots if slot.kind is not Kind.INPUT]
        for slot, layout, (holder, name) in zip(slots, source.layouts, source.locations, strict=True):
            tensor, shared = holder[name], layout is Layout.SHARED
            if tensor.device.type != "cpu":
                return f"{slot.name} lies on {tensor.device}, and parts are for the cores of a CPU"
            if shared and tensor.requires_grad:
                return f"all members share the trained {slot.name}, whose gradient is a sum over them"
            if shared and slot.name in source.compiled.written:
                return f"all members share {slot.name}, which forward writes to"
        if operator := next(drawing(source.compiled.graph), None):
            return f"{operator} draws numbers for all members, one after the other"
    return ""


def drawing(graph: fx.Graph) -> Iterator[Any]:
    """Yield the operators of a graph that draw random numbers from a generator that all members share."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            arguments = by_name(node.target, *node.meta.get("arguments", (node.args, node.kwargs)))
            if is_random(node.target, arguments) and not seedable(node.target, arguments, node.meta.get("val")):
                yield node.target

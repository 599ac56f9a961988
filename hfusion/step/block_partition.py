"""Into which parts a step is divided: blocks of members, some of them computed at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
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
from hfusion.step.autotune import ONE_PART, NotedProgram, WayTimes
from hfusion.step.compile_mode import AUTO
from hfusion.step.compiled_step import MAX_LOOPED_CALLS, FusedStep, PerMemberStep, StepProgram, too_many_kinds
from hfusion.step.parallel_blocks import PartedStep
from hfusion.step.recorded_step import recorded
from hfusion.torch_private.cpp_block_entry import Unparted

# Of MobileNetV2's members a thread, blocks of 4 took as long as one of 8, and blocks of 2 took 1.25 of that.
LEAST_BLOCK = 4


@dataclass(frozen=True)
class Parting:
    """Programs compute ``size`` members, or all if None; ``threads`` of them at a time, each with ``inner`` of torch's.

    ``measured``: whether that is faster than one after the other is to be measured. ``rival``: whether all members in
    one part, each operator on torch's threads, may be faster; ``times``: how fast both were. ``why``: why there is one
    part where more were asked for. ``direct``: whether blocks that run one after the other can be called as those on
    threads are, which spares Python's part in each, and copies of their gradients.
    """

    size: int | None
    threads: int = 1
    inner: int = 1
    measured: bool = False
    why: str = ""
    rival: bool = False
    times: WayTimes | None = None
    direct: bool = False

    @staticmethod
    def of(
        parts: int | str, forward: BoundProgram, loss: BoundProgram, size: int | None, most: int | None = None
    ) -> Parting:
        """For ``parts`` at a time, or for as many as torch has threads; ``size``: where it is given.

        ``most``: how many members may be computed at a time, by all threads; None where memory sets no limit.

        An operator that all threads compute together waits for the slowest of them, and the small ones gain nothing:
        where the array loops over members, and every thread has as much to do, parts are as good as they can be.
        Elsewhere both compute about as much, and what it takes to wake threads decides, or what is left to the last.
        """
        members, cores = forward.compiled.program.members, torch.get_num_threads()
        threads = min(cores if isinstance(parts, str) else parts, members if most is None else most)
        if threads == 1:
            direct = not _obstacle(forward, loss)
            if size is None and cores == 1 and direct and not _without_threads():
                block = block_size(forward, 1)
                size = None if block >= members or too_many_kinds(forward, loss, block) else block
            return Parting(_limited(size, most), inner=cores, direct=direct)
        block = block_size(forward, threads) if size is None else size
        if most is not None:
            block = min(block, most // threads)
        why = obstacle(forward, loss) or too_many_kinds(forward, loss, block)
        if why:
            return Parting(_limited(size, most), why=why)
        auto = parts == AUTO
        even = members % threads == 0 and cores % threads == 0
        rival = auto and size is None and most is None and not (even and forward.looped_calls > MAX_LOOPED_CALLS)
        return Parting(block, threads, max(1, cores // threads), auto, rival=rival)

    def chosen(self, times: WayTimes) -> Parting:
        """Return the faster of these parts and of all members in one."""
        return Parting(None, times=times) if times.fastest == ONE_PART else replace(self, rival=False, times=times)

    def set_threads(self) -> AbstractContextManager[None]:
        """In which its programs are compiled: inductor writes for as many threads as it finds set."""
        return torch_threads(self.inner) if self.threads > 1 else nullcontext()

    def applied(self, program: FusedStep | PerMemberStep) -> StepProgram:
        """The step with its parts. Raises Unparted."""
        if self.why:
            return NotedProgram(recorded(program), f"in one part: {self.why}")
        if self.threads == 1:
            return self._in_turn(program)
        assert isinstance(program, PerMemberStep), program
        return PartedStep(program, self.threads, self.inner, self.measured)

    def _in_turn(self, program: FusedStep | PerMemberStep) -> StepProgram:
        if self.direct and isinstance(program, PerMemberStep) and len(program.blocks) > 1 and not _without_threads():
            with suppress(Unparted):
                return PartedStep(program, 1, self.inner, measured=False)
        return recorded(program)


def _limited(size: int | None, most: int | None) -> int | None:
    """The smaller of two numbers of members, where None stands for all."""
    return size if most is None else most if size is None else min(size, most)


def block_size(forward: BoundProgram, threads: int) -> int:
    """How many members a program computes where ``threads`` of them run at a time: a thread's share of the members, or
    a whole fraction of it, so that the largest value of a member's forward stays in a core's cache for all of these.

    Measured with 64 members on two threads, blocks of 8 took 0.71 of the time of blocks of 32 in DCGAN's generator, and
    0.83 in a small CNN; of a transformer's 8 members a thread, blocks of 4 took 0.89. Fewer cost more calls than that.
    """
    members = forward.compiled.program.members
    share = -(-members // threads)
    model = Model.of(forward.compiled.graph, 1)
    values = [size for node, size in model.bytes.items() if node.op == "call_function"]
    fit = max(LEAST_BLOCK, core_cache() // max([1, *values]))
    return -(-members // (threads * max(1, share // fit)))


def obstacle(forward: BoundProgram, loss: BoundProgram) -> str:
    """Why a step cannot run in parts at the same time, in words; empty if it can."""
    return _obstacle(forward, loss) or _without_threads()


def _without_threads() -> str:
    found = library()
    return found if isinstance(found, str) else ""


def _obstacle(forward: BoundProgram, loss: BoundProgram) -> str:
    for source in (forward, loss):
        slots = [slot for slot in source.compiled.program.slots if slot.kind is not Kind.INPUT]
        for slot, layout, (holder, name) in zip(slots, source.layouts, source.places, strict=True):
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
    """The operators of the members' forward or loss that draw random numbers, and not from the members' seeds."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            given = by_name(node.target, *node.meta.get("arguments", (node.args, node.kwargs)))
            if is_random(node.target, given) and not seedable(node.target, given, node.meta.get("val")):
                yield node.target

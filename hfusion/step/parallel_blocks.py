"""A compiled step whose blocks of members run in parallel, on threads that do not hold the GIL.

Each thread repeatedly takes the next block that no thread has started. Results do not depend on which thread computes a
block. Python's work per step does not grow with the number of blocks: it passes the addresses of the input stacks, of
which each block reads its rows (``inductor.py``), and of the memory for losses and gradients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import addressof
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from hfusion.compiler.compiled_program import BoundProgram
from hfusion.core.layout import Layout
from hfusion.core.member_random import new_seeds
from hfusion.core.program import Kind
from hfusion.device.native import core_cache, library
from hfusion.device.team import SOURCE, PieceError, Team, address_of, team, torch_threads
from hfusion.ops.random import seedable
from hfusion.ops.rule import is_random
from hfusion.passes.candidates import by_name
from hfusion.passes.cost.price import Model
from hfusion.step.compiled_step import BlocksStep, clear, too_many_kinds
from hfusion.step.recorded_step import recorded
from hfusion.step.step_graph import StepCall
from hfusion.torch_private.inductor import CannotPartition, handles_of, row_entry, tensors_of

_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _BlockFields(ctypes.Structure):
    """The struct of the same name in `team.c`."""

    _fields_ = (("program", _POINTER), ("start", _INTEGER), ("rows", _INTEGER))


class _StepFields(ctypes.Structure):
    """The struct of the same name in `team.c`."""

    _fields_ = (
        *(("blocks", _POINTER), ("tensors", _POINTER), ("stacked", ctypes.c_char_p), ("inputs", _INTEGER)),
        *(("outputs", _POINTER), ("bytes", _POINTER), ("count", _INTEGER)),
    )


_pointer: Callable[[Any, None], int] = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], _POINTER  # type: ignore[attr-defined]


def _pointers(handles: Sequence[Any]) -> list[int]:
    """Return the addresses of handles of tensors for C++ code, which are valid until `tensors_of` releases them."""
    return [_pointer(handle, None) for handle in handles]


class _Fixed:
    """State that is reused at every step as long as the array's tensors do not move.

    ``step``: the struct that is passed to C. Each step fills in the addresses of the batch, at the end of ``inputs``,
    and that of the losses, the first of ``outputs``.
    """

    def __init__(self, program: ParallelBlocksStep, tensors: Sequence[Tensor], call: StepCall, itemsize: int) -> None:
        self.members, self.idle = program.tensors.members, call.idle
        # Blocks of idle members are skipped, if there are others: their losses are NaN, their gradients 0.
        pairs = list(zip(program.blocks, program.kinds, strict=True))
        blocks = [pair for pair in pairs if not call.idle.issuperset(pair[0])] or pairs
        self.addresses = list(map(Tensor.data_ptr, tensors))
        # Detached, since grad mode is on by default in each thread.
        detached = [tensor.detach() for tensor in tensors]
        allocate = torch.empty_like if blocks == pairs else torch.zeros_like
        self.grads = [allocate(detached[k], memory_format=torch.contiguous_format) for k in program.trained]
        self.written = {grad.untyped_storage().data_ptr() for grad in self.grads}
        handles = handles_of(detached)
        finalize(self, tensors_of, handles).atexit = False
        stacked = [*program.tensors.stacked, *call.stacked, *[True] * program.seeded]
        self.batch = slice(len(detached), len(stacked))
        self.inputs = _array([*_pointers(handles), *[0] * (len(stacked) - len(detached))])
        self.outputs = _array([0, *map(Tensor.data_ptr, self.grads)])
        self._bytes = _array([itemsize, *(grad.nbytes // self.members for grad in self.grads)])
        self._stacked = bytes(stacked)
        self.blocks = (_BlockFields * len(blocks))(
            *(_BlockFields(program.entries[kind], rows.start, len(rows)) for rows, kind in blocks)
        )
        self.step = _StepFields(
            addressof(self.blocks),
            addressof(self.inputs),
            self._stacked,
            len(self.inputs),
            addressof(self.outputs),
            addressof(self._bytes),
            len(self.outputs),
        )


def _array(values: Sequence[int]) -> Any:
    return (ctypes.c_uint64 * len(values))(*values)


@dataclass(eq=False)
class ParallelBlocksStep(BlocksStep):
    """Runs its blocks on ``threads`` threads, each with ``inner`` torch threads.

    The calling thread is one of them, unless operators may use oneDNN's caches. Gradients lie in the same memory at
    every step.
    """

    threads: int = 1
    inner: int = 1

    def __post_init__(self) -> None:
        self.entries = [row_entry(block.run) for block in self.programs]
        # Caches of oneDNN depend on the number of threads.
        one_dnn = any("convolution" in name or "mkldnn" in name for name in map(str, self.operators))
        self._joined = self.threads == 1 or not one_dnn
        self._losses: torch.dtype | None = None
        self._fixed: _Fixed | None = None
        self._team: Team | None = None

    @property
    def team(self) -> Team | None:
        """The threads, which other kernels may use too; None if the blocks run sequentially."""
        return None if self.threads == 1 else self._team

    @property
    def how(self) -> str:
        inner = f", each with {self.inner} of torch's" if self.inner > 1 else ""
        return super().how if self.threads == 1 else f"{super().how}, on {self.threads} threads{inner}"

    def step(self, call: StepCall) -> Tensor:
        if self._losses is None:
            with torch_threads(self.inner):
                first = super().step(call)
            self._losses = first.dtype
            return first
        tensors = self.tensors.all()
        clear(self.params)
        fixed = self._fixed
        if fixed is None or fixed.idle != call.idle or fixed.addresses != list(map(Tensor.data_ptr, tensors)):
            fixed = self._fixed = _Fixed(self, tensors, call, self._losses.itemsize)
        self._team = self._team or team(self.threads, self.inner, self._joined)
        losses = torch.full((fixed.members,), torch.nan, dtype=self._losses, device="cpu")
        fixed.outputs[0] = losses.data_ptr()
        # This step will overwrite the gradients, which an argument may be.
        batch = [t.clone() if t.untyped_storage().data_ptr() in fixed.written else t for t in call.batch()]
        handles = handles_of([*batch, *([new_seeds(fixed.members)] if self.seeded else [])])
        fixed.inputs[fixed.batch] = _pointers(handles)
        try:
            # Grad mode is off in the threads of the team, and must be off in this one, which may be among them.
            with torch.no_grad():
                self._team.run(address_of("step_block"), addressof(fixed.step), len(fixed.blocks))
        except PieceError as error:
            block = fixed.blocks[error.piece]
            last = block.start + block.rows - 1
            raise RuntimeError(f"the step of members {block.start} to {last} failed: {error}") from None
        finally:
            tensors_of(handles)
        for index, grad in zip(self.trained, fixed.grads, strict=True):
            tensors[index].grad = grad
        return losses


# Divide a step into blocks, and choose how many of them run in parallel.

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
        limit = min(filter(None, (size, most)), default=None)
        threads = min(cores if isinstance(parts, str) else parts, members if most is None else most)
        if threads == 1:
            direct = not _obstacle(forward, loss)
            if size is None and cores == 1 and direct and not _without_threads():
                block = block_size(forward, 1)
                if block < members and not too_many_kinds(forward, loss, block):
                    limit = block if most is None else min(block, most)
            return BlockPartition(limit, inner=cores, direct=direct)
        block = block_size(forward, threads) if size is None else size
        if most is not None:
            block = min(block, most // threads)
        why = _obstacle(forward, loss) or _without_threads() or too_many_kinds(forward, loss, block)
        if why:
            return BlockPartition(limit, why=why)
        return BlockPartition(block, threads, max(1, cores // threads))

    def applied(self, program: BlocksStep) -> BlocksStep:
        """Return the step that runs ``program`` in these blocks. Raises CannotPartition if threads cannot call it."""
        if self.threads > 1:
            return ParallelBlocksStep(*program.parts, self.threads, self.inner)
        if self.direct and len(program.kinds) > 1 and not _without_threads():
            with suppress(CannotPartition):
                return ParallelBlocksStep(*program.parts, 1, self.inner)
        return recorded(program)


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


def _without_threads() -> str:
    team_library = library(SOURCE)
    return team_library if isinstance(team_library, str) else ""


def _obstacle(forward: BoundProgram, loss: BoundProgram) -> str:
    """Return why blocks of a step cannot run by themselves; empty if they can."""
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
        for node in source.compiled.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                arguments = by_name(node.target, *node.meta.get("arguments", (node.args, node.kwargs)))
                if is_random(node.target, arguments) and not seedable(node.target, arguments, node.meta.get("val")):
                    return f"{node.target} draws numbers for all members, one after the other"
    return ""

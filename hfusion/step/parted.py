"""A compiled step whose blocks of members run at the same time, on threads that hold no lock of Python's.

Each thread takes the next block that nobody has begun, and computes it alone: which one it is does not show in the
results. Python does the same for each step, however many blocks and threads there are: it hands on the addresses of the
stacks, of which the blocks take their rows (``row_entry.py``), and of those that they write losses and gradients to.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, fx

from hfusion.compiler.bound import BoundProgram, Place
from hfusion.core.layout import Layout
from hfusion.core.program import Kind
from hfusion.device.team import PieceError, Team, address_of, team
from hfusion.device.team import library as team_library
from hfusion.passes.candidates import by_name
from hfusion.step.compiled import Library, PerMemberStep, StepProgram, clear, make
from hfusion.step.recorded import recorded
from hfusion.step.row_entry import row_entry
from hfusion.step.step_graph import StepCall

_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _BlockFields(ctypes.Structure):
    """As `team.c` has it."""

    _fields_ = (
        ("program", _POINTER),
        ("start", _INTEGER),
        ("rows", _INTEGER),
    )


class _StepFields(ctypes.Structure):
    """As `team.c` has it."""

    _fields_ = (
        ("blocks", _POINTER),
        ("tensors", _POINTER),
        ("stacked", ctypes.c_char_p),
        ("inputs", _INTEGER),
        ("outputs", _POINTER),
        ("bytes", _POINTER),
        ("count", _INTEGER),
    )


class _Handles:
    """What C++ calls tensors by, until they are released."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
        self.addresses: list[int] = [_pointer(capsule, None) for capsule in self._capsules]

    def release(self) -> None:
        torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(self._capsules)
        self._capsules = []


_pointer: Callable[[Any, None], int] = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], _POINTER  # type: ignore[attr-defined]


class _Fixed:
    """What stays from step to step, as long as the tensors of the array lie where they lay.

    ``step`` is what C is given. Left out are the tensors of the batch, after ``inputs``, and the losses, the first of
    ``outputs``.
    """

    def __init__(
        self,
        program: PerMemberStep,
        entries: Sequence[int],
        own: Sequence[Tensor],
        call: StepCall,
        losses: torch.dtype,
    ) -> None:
        self.members, blocks = program.members, program.blocks
        self.addresses = list(map(Tensor.data_ptr, own))
        # Detached: threads ask for gradients unless they are told not to.
        held = [tensor.detach() for tensor in own]
        self.grads = [torch.empty_like(held[k], memory_format=torch.contiguous_format) for k in program.trained]
        handles = _Handles(held)
        finalize(self, handles.release).atexit = False
        self.batch = slice(len(held), len(held) + len(call.leaves))
        self.inputs = _array([*handles.addresses, *[0] * len(call.leaves)])
        self.outputs = _array([0, *map(Tensor.data_ptr, self.grads)])
        self._bytes = _array([losses.itemsize, *(grad.nbytes // self.members for grad in self.grads)])
        self._stacked = bytes([*program.tensors.stacked, *call.stacked])
        self.blocks = (_BlockFields * len(blocks))(
            *(
                _BlockFields(entries[kind], rows.start, len(rows))
                for rows, kind in zip(blocks, program.kinds, strict=True)
            )
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


class PartedStep:
    """``program`` with its blocks on ``threads`` threads; ``entries[k]`` is where that of its program k lies.

    Gradients lie in the same memory at every step but the first, which runs block by block.
    """

    def __init__(self, program: PerMemberStep, entries: Sequence[int], threads: int) -> None:
        self._program, self._entries, self._threads = program, tuple(entries), threads
        self._losses: torch.dtype | None = None
        self._fixed: _Fixed | None = None
        self._process = 0
        # Once there are steps on threads.
        self.team: Team | None = None

    @property
    def how(self) -> str:
        """In words."""
        return f"{self._program.how}, on {self._threads} threads"

    def fits(self, call: StepCall) -> bool:
        return self._program.fits(call)

    def step(self, call: StepCall) -> Tensor:
        """Write gradients and buffers; the losses ``[B]``."""
        if self._losses is None:
            first = self._program.step(call)
            self._losses = first.dtype
            return first
        clear(self._program.params)
        own = self._program.tensors.all()
        fixed = self._fixed
        if fixed is None or fixed.addresses != list(map(Tensor.data_ptr, own)):
            fixed = self._fixed = _Fixed(self._program, self._entries, own, call, self._losses)
        if self.team is None or self._process != os.getpid():
            # A forked process has no threads but one.
            self._process, self.team = os.getpid(), team(self._threads)
        losses = torch.empty(fixed.members, dtype=self._losses)
        fixed.outputs[0] = losses.data_ptr()
        handles = _Handles(call.batch())
        fixed.inputs[fixed.batch] = handles.addresses
        try:
            self.team.run(address_of("step_block"), addressof(fixed.step), len(fixed.blocks))
        except PieceError as error:
            rows = self._program.blocks[error.piece]
            raise RuntimeError(f"the step of members {rows.start} to {rows.stop - 1} failed: {error}") from None
        finally:
            handles.release()
        for place, grad in zip(self._program.trained, fixed.grads, strict=True):
            own[place].grad = grad
        return losses


@dataclass(frozen=True, eq=False)
class OnePart:
    """``program``, which was asked for in parts and runs in one, and why."""

    program: StepProgram
    why: str
    team: Team | None = None

    @property
    def how(self) -> str:
        """In words."""
        return f"{self.program.how}, in one part: {self.why}"

    def fits(self, call: StepCall) -> bool:
        return self.program.fits(call)

    def step(self, call: StepCall) -> Tensor:
        """Write gradients and buffers; the losses ``[B]``."""
        return self.program.step(call)


def parted(program: PerMemberStep, threads: int) -> PartedStep | OnePart:
    """``program``, whose blocks were compiled for one thread each, on ``threads`` threads."""
    found = team_library()
    entries = [row_entry(run) for run in program.runs]
    why = next((entry for entry in (found, *entries) if isinstance(entry, str)), "")
    usable = [entry for entry in entries if isinstance(entry, int)]
    return OnePart(program, why) if why else PartedStep(program, usable, threads)


def single_part(forward: BoundProgram, loss: BoundProgram) -> str:
    """Why a step cannot run in parts at the same time, in words; empty if it can."""
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


def in_parts(
    parts: int,
    forward: BoundProgram,
    loss: BoundProgram,
    call: StepCall,
    places: Sequence[Place],
    library: Library,
    kind: Any,
    size: int | None,
    autocast: Any,
) -> StepProgram:
    """As `make`, with blocks of members on ``parts`` threads at a time, where that is possible."""
    if why := single_part(forward, loss):
        return OnePart(recorded(make(forward, loss, call, places, library, kind, size, autocast)), why)
    members = forward.compiled.program.members
    size = -(-members // parts) if size is None else size
    with one_thread():
        program = make(forward, loss, call, places, library, (*kind, "one thread"), size, autocast)
    assert isinstance(program, PerMemberStep), program
    return parted(program, min(parts, members))


def drawing(graph: fx.Graph) -> Iterator[Any]:
    """The operators of a member's forward or loss that draw random numbers."""
    tagged = (n for n in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()))
    for node in tagged:
        given = by_name(node.target, node.args, node.kwargs)
        # Attention, and dropout in evaluation, are called with all that they may be given.
        if given.get("dropout_p", given.get("p")) != 0 and given.get("train", True) is not False:
            yield node.target


@contextmanager
def one_thread() -> Iterator[None]:
    """Inductor writes for as many threads as it finds set."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

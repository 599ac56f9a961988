"""A compiled step whose blocks of members run in parallel, on threads that do not hold the GIL.

Each thread repeatedly takes the next block that no thread has started. Results do not depend on which thread computes a
block. Python's work per step does not grow with the number of blocks: it passes the addresses of the input stacks, of
which each block reads its rows (``cpp_block_entry.py``), and of the memory for losses and gradients.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import addressof
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from hfusion.core.member_random import new_seeds
from hfusion.device.openmp import torch_threads
from hfusion.device.team import PieceError, Team, address_of, team
from hfusion.step.compiled_step import PerMemberStep, clear
from hfusion.step.step_graph import StepCall
from hfusion.torch_private.cpp_block_entry import row_entry
from hfusion.torch_private.cpp_entry import handles_of, tensors_of

_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _BlockFields(ctypes.Structure):
    """The struct of the same name in `team.c`."""

    _fields_ = (
        ("program", _POINTER),
        ("start", _INTEGER),
        ("rows", _INTEGER),
    )


class _StepFields(ctypes.Structure):
    """The struct of the same name in `team.c`."""

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
    """Handles of tensors for C++ code, until they are released."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._capsules = handles_of(tensors)
        self.addresses: list[int] = [_pointer(capsule, None) for capsule in self._capsules]

    def release(self) -> None:
        tensors_of(self._capsules)
        self._capsules = []


_pointer: Callable[[Any, None], int] = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], _POINTER  # type: ignore[attr-defined]


class _Fixed:
    """State that is reused at every step as long as the array's tensors do not move.

    ``step``: the struct that is passed to C. Each step fills in the addresses of the batch, at the end of ``inputs``,
    and that of the losses, the first of ``outputs``.
    """

    def __init__(
        self,
        program: PerMemberStep,
        entries: Sequence[int],
        tensors: Sequence[Tensor],
        call: StepCall,
        losses: torch.dtype,
    ) -> None:
        self.members, self.idle = program.members, call.idle
        active = call.wants(program.blocks)
        blocks = [(rows, kind) for rows, kind, w in zip(program.blocks, program.kinds, active, strict=True) if w]
        self.addresses = list(map(Tensor.data_ptr, tensors))
        # Detached, since grad mode is on by default in each thread.
        detached = [tensor.detach() for tensor in tensors]
        allocate = torch.empty_like if all(active) else torch.zeros_like
        self.grads = [allocate(detached[k], memory_format=torch.contiguous_format) for k in program.trained]
        self._written = {grad.untyped_storage().data_ptr() for grad in self.grads}
        handles = _Handles(detached)
        finalize(self, handles.release).atexit = False
        stacked = [*program.tensors.stacked, *call.stacked, *[True] * program.seeded]
        self.batch = slice(len(detached), len(stacked))
        self.inputs = _array([*handles.addresses, *[0] * (len(stacked) - len(detached))])
        self.outputs = _array([0, *map(Tensor.data_ptr, self.grads)])
        self._bytes = _array([losses.itemsize, *(grad.nbytes // self.members for grad in self.grads)])
        self._stacked = bytes(stacked)
        self.blocks = (_BlockFields * len(blocks))(
            *(_BlockFields(entries[kind], rows.start, len(rows)) for rows, kind in blocks)
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

    def apart(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, cloned if it shares memory with the gradients, which this step will overwrite."""
        return tensor.clone() if tensor.untyped_storage().data_ptr() in self._written else tensor


def _of_one_dnn(operator: str) -> bool:
    """Return whether an operator may use oneDNN's caches, which depend on the number of threads."""
    return "convolution" in operator or "mkldnn" in operator


def _array(values: Sequence[int]) -> Any:
    return (ctypes.c_uint64 * len(values))(*values)


class ParallelBlocksStep:
    """Runs the blocks of ``program`` on ``threads`` threads, each with ``inner`` torch threads.

    The calling thread is one of them, unless operators may use oneDNN's caches. Gradients lie in the same memory at
    every step.
    """

    def __init__(self, program: PerMemberStep, threads: int, inner: int) -> None:
        self._program, self._threads, self._inner = program, threads, inner
        self._entries = list(map(row_entry, program.runs))
        self._joined = threads == 1 or not any(map(_of_one_dnn, map(str, program.operators)))
        self._losses: torch.dtype | None = None
        self._fixed: _Fixed | None = None
        self._process = 0
        self._team: Team | None = None

    @property
    def team(self) -> Team | None:
        """The threads, which other kernels may use too; None if the blocks run sequentially."""
        return None if self._threads == 1 else self._team

    @property
    def how(self) -> str:
        """A description of how the blocks run."""
        if self._threads == 1:
            return self._program.how
        inner = f", each with {self._inner} of torch's" if self._inner > 1 else ""
        return f"{self._program.how}, on {self._threads} threads{inner}"

    def fits(self, call: StepCall) -> bool:
        return self._program.fits(call)

    def step(self, call: StepCall) -> Tensor:
        """Write gradients and buffers, and return the losses ``[B]``."""
        if self._losses is None:
            with torch_threads(self._inner):
                first = self._program.step(call)
            self._losses = first.dtype
            return first
        return self._on_threads(call, self._losses)

    def _on_threads(self, call: StepCall, dtype: torch.dtype) -> Tensor:
        clear(self._program.params)
        tensors = self._program.tensors.all()
        fixed = self._fixed
        if fixed is None or fixed.idle != call.idle or fixed.addresses != list(map(Tensor.data_ptr, tensors)):
            fixed = self._fixed = _Fixed(self._program, self._entries, tensors, call, dtype)
        helpers = self._helpers()
        losses = torch.full((fixed.members,), torch.nan, dtype=dtype, device="cpu")
        fixed.outputs[0] = losses.data_ptr()
        batch = [fixed.apart(tensor) for tensor in call.batch()]
        handles = _Handles([*batch, *([new_seeds(fixed.members)] if self._program.seeded else [])])
        fixed.inputs[fixed.batch] = handles.addresses
        try:
            # Grad mode is off in the threads of the team, and must be off in this one, which may be among them.
            with torch.no_grad():
                helpers.run(address_of("step_block"), addressof(fixed.step), len(fixed.blocks))
        except PieceError as error:
            block = fixed.blocks[error.piece]
            last = block.start + block.rows - 1
            raise RuntimeError(f"the step of members {block.start} to {last} failed: {error}") from None
        finally:
            handles.release()
        for index, grad in zip(self._program.trained, fixed.grads, strict=True):
            tensors[index].grad = grad
        return losses

    def _helpers(self) -> Team:
        if self._team is None or self._process != os.getpid():
            # A forked process has none of its parent's threads.
            self._process, self._team = os.getpid(), team(self._threads, self._inner, self._joined)
        return self._team

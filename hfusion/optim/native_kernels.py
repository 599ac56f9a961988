"""Steps by kernels in C: ``kernels.c`` and what is generated from formulas, compiled at first use.

Without a compiler the optimizers run their formulas in torch (``torch_steppers.py``) and are only slower.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfusion.core.memory import real_view
from hfusion.device import native
from hfusion.device.calibrate import compute_rates
from hfusion.device.team import active_team
from hfusion.optim import kernel_source
from hfusion.optim.hyper import Settings
from hfusion.optim.torch_steppers import Stepper, StepTensors
from hfusion.torch_private.export_state import tensor_guards

SOURCE = Path(__file__).with_name("kernels.c")

# Elements below which a further thread costs more than it saves, and the sizes of lists, as in `kernels.c`.
_GRAIN = 16384
_MAX_LISTS, _MAX_NUMBERS = 16, 8

_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p


def library() -> ctypes.CDLL | str:
    """Return the loaded kernels, or the reason why there are none. Compiles at most once in a process."""
    return native.library(SOURCE)


def start_compiling() -> None:
    """Compile the kernels in the background. The machine's rates are measured first, which compiling would disturb."""
    native.compile_in_background(SOURCE, partial(compute_rates, torch.device("cpu")))


def plan(program: kernel_source.KernelProgram, tensors: StepTensors) -> NativeStepper | None:
    """Return the steps of these tensors by kernels; None without a compiler, and for half precision."""
    first, numbers = real_view(tensors.stacks[0][0]), tensors.numbers
    if first.dtype not in native.TYPES or len(tensors.stacks) > _MAX_LISTS - 1 or len(numbers) > _MAX_NUMBERS:
        return None
    if isinstance(library(), str):
        return None
    kinds = tuple(native.TYPES[values[0].dtype] for values in numbers.values())
    text = kernel_source.c_source(program, native.TYPES[first.dtype], kinds)
    functions = native.library(SOURCE.with_name(f"{program.formula.__name__.lower()}.c"), text)
    return None if isinstance(functions, str) else NativeStepper(program, functions, tensors)


class _NativeStep(ctypes.Structure):
    """A step; the same struct as in `kernels.c`."""

    _fields_ = (
        *((name, _INTEGER) for name in ("tensors", "members", "lists", "numbers", "element", "record")),
        *((name, _INTEGER) for name in ("stride", "flush", "shares")),
        *((name, _POINTER) for name in ("sizes", "stacks", "grads", "counts", "widths", "columns", "advance")),
        *((name, _POINTER) for name in ("row", "fill", "first", "ends", "records")),
    )


class NativeStepper(Stepper):
    """Steps of contiguous stacks ``[members, ...]`` on the CPU.

    Args:
        program: what a step computes.
        functions: the library that was compiled from it.
        step_tensors: what is stepped; the caller keeps it alive.
    """

    contiguous = True
    unrecordable = "the host has no launches"

    def __init__(self, program: kernel_source.KernelProgram, functions: ctypes.CDLL, step_tensors: StepTensors) -> None:
        stacks, numbers = step_tensors.stacks, step_tensors.numbers
        params = list(map(real_view, stacks[0]))
        members, tensors, element = len(params[0]), len(params), params[0].element_size()
        record = element * len(program.scalars)
        sizes = array("q", [param.numel() // members for param in params])
        self._program, self._total = program, sum(sizes) * members
        self._stacks = _addresses([tensor for stack in stacks for tensor in stack])
        widths = array("q", [vectors[0].element_size() for vectors in numbers.values()])
        counts = _addresses([vector for vectors in numbers.values() for vector in vectors])
        lengths = (tensors, tensors * members, -(-tensors * members * record // 8))
        tables = [array("q", bytes(8 * length)) for length in lengths]
        # The struct holds addresses only.
        self._kept = functions, sizes, widths, counts, tables
        self._settings: Settings | None = None
        self._step = _NativeStep(
            *(tensors, members, len(stacks) + 1, len(numbers), element, record, 0, 0, 1),
            *(_start(sizes), _start(self._stacks), None, _start(counts), _start(widths), None, None),
            *(_address(functions.row), _address(functions.fill), *map(_start, tables)),
        )
        self._argument = ctypes.addressof(self._step)
        self._run, self._prepare = _function("run", 2), _function("prepare", 1)

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        step = self._step
        if settings is not self._settings:
            self._settings = settings
            step.stride, step.columns = len(settings.members), settings.table.data_ptr()
            step.advance = settings.advance.data_ptr()
            step.flush = self._program.flushes(min(getattr(value, "eps", 0.0) for value in settings.members))

    def launch(self, grads: Sequence[Tensor]) -> object:
        """Update the tensors, and increment the step counts."""
        step = self._step
        # Named, so that it lives as long as the call.
        addresses = _addresses(grads)
        step.grads = _start(addresses)
        team = active_team()
        shares = 1 if team is None else min(team.threads, self._total // _GRAIN)
        if team is None or shares <= 1:
            self._run(self._argument, torch.get_num_threads())
            return None
        step.shares = shares
        self._prepare(self._argument)
        team.run(_address(_function("run_share", 4)), self._argument, shares)
        return None


class FiniteCheck:
    """Check whether all numbers in tensors are finite; cheap if the tensors are of the kinds of the last call."""

    def __init__(self) -> None:
        self._count, self._guards = 0, tensor_guards(())

    def __call__(self, tensors: Sequence[Tensor]) -> bool | None:
        """Return whether all numbers are finite; None without a library, and unless all tensors are contiguous, on the
        CPU and of one dtype (float32 or float64).
        """
        if len(tensors) != self._count or not self._guards.check(*tensors):
            dtype = tensors[0].dtype
            if dtype not in native.TYPES or isinstance(library(), str):
                return None
            # The memory of a subclass is not where its data_ptr says.
            plain = all(type(t) is Tensor and t.layout is torch.strided and t.is_contiguous() for t in tensors)
            if not (plain and all(t.is_cpu and t.dtype == dtype for t in tensors)):
                return None
            self._count, self._guards = len(tensors), tensor_guards(tensors)
            self._sizes = array("q", list(map(Tensor.numel, tensors)))
            self._kernel = _function(f"finite_{native.TYPES[dtype]}", 3)
        # Named, so that it lives as long as the call.
        addresses = _addresses(tensors)
        return bool(self._kernel(self._count, _start(self._sizes), _start(addresses)))


@cache
def _function(name: str, arguments: int) -> Callable[..., int]:
    """Return a function of the kernels, all of whose arguments are integers or addresses."""
    kernels = library()
    assert not isinstance(kernels, str), kernels
    function: Any = kernels[name]
    function.argtypes = [_INTEGER] * arguments
    return function  # type: ignore[no-any-return]


def _address(function: Any) -> int:
    return ctypes.cast(function, _POINTER).value or 0


def _addresses(tensors: Sequence[Tensor]) -> array[int]:
    # Through a list: an array filled from an iterator is slower.
    return array("Q", list(map(Tensor.data_ptr, tensors)))


def _start(values: array[int]) -> int:
    return values.buffer_info()[0]

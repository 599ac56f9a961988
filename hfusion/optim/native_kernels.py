"""The kernels of ``kernels.c``.

If they are not available, the optimizers run their formulas (``eager_steppers.py``) and are only slower.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hfusion.device import native
from hfusion.device.calibrate import compute_rates
from hfusion.device.team import PieceError, Team, active_team
from hfusion.optim.formula import Formula
from hfusion.optim.settings import Settings
from hfusion.torch_private.dynamo_state import tensor_guards

Kernel: TypeAlias = Callable[..., int]

SOURCE = Path(__file__).with_name("kernels.c")

# Elements below which a further thread costs more than it saves, as in `kernels.c`.
_GRAIN = 16384

_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p


def library() -> ctypes.CDLL | str:
    """Return the loaded kernels, or the reason why there are none. Compiles at most once in a process."""
    return native.library(SOURCE)


def start_compiling() -> None:
    """Compile the kernels in the background. The machine's rates are measured first, which compiling would disturb."""
    native.compile_in_background(SOURCE, partial(compute_rates, torch.device("cpu")))


def kernel(name: str, dtype: torch.dtype) -> Kernel | None:
    """Return the kernel ``name`` for CPU tensors of ``dtype`` (float32 or float64), or None without a library."""
    kernels = library()
    if isinstance(kernels, str):
        return None
    function: Kernel = kernels[f"{name}_{native.TYPES[dtype]}"]
    # params ... counts are addresses, the other arguments numbers (kernels.c).
    function.argtypes = [*[_INTEGER] * 3, *[_POINTER] * 6, *[_INTEGER] * 4]  # type: ignore[attr-defined]
    return function


def plan(formula: type[Formula], stacks: Sequence[Sequence[Tensor]], counts: Sequence[Tensor]) -> NativeStepper | None:
    """The steps of ``formula`` for these stacks, see `NativeStepper`; None without a library, or for other dtypes."""
    assert formula.kernel is not None
    dtype = stacks[0][0].dtype
    function = kernel(formula.kernel, dtype) if dtype in native.TYPES else None
    return NativeStepper(function, stacks, counts) if function else None


class NativeStepper:
    """The arguments of ``kernel`` that stay from step to step.

    ``stacks``: the parameters, then each state buffer; each a list of contiguous tensors ``[members, ...]``
    of one dtype on the CPU. ``counts``: of the steps, for each parameter contiguous float32 ``[members]``, or nothing.
    The caller keeps all of them alive.
    """

    contiguous = True
    unrecordable = "the host has no launches"

    def __init__(self, kernel: Kernel, stacks: Sequence[Sequence[Tensor]], counts: Sequence[Tensor]) -> None:
        params = stacks[0]
        self._kernel = kernel
        self._address = ctypes.cast(kernel, _POINTER).value  # type: ignore[arg-type]
        self._members = len(params[0])
        self._sizes = array("q", [param.numel() // self._members for param in params])
        self._total = sum(self._sizes) * self._members
        self._addresses = _stack_addresses(stacks)
        self._counts = _addresses(counts)
        self._settings: Settings | None = None
        self._advance = _function("advance")

    def release(self) -> None:
        """Do nothing: this object holds addresses, not tensors."""

    def move(self, stacks: Sequence[Sequence[Tensor]]) -> None:
        """Continue with ``stacks``: the same tensors at other addresses."""
        # In place: the arguments point to these arrays.
        for addresses, new_addresses in zip(self._addresses, _stack_addresses(stacks), strict=True):
            addresses[:] = new_addresses

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts and update the tensors. ``grads``: one gradient for each parameter."""
        if settings is not self._settings:
            self._settings, self._arguments = settings, self._prepared(settings)
        before, after, counting = self._arguments
        fresh = _addresses(grads)
        if counting is not None:
            self._advance(*counting)
        team = active_team()
        shares = 1 if team is None else min(team.threads, self._total // _GRAIN)
        if team is not None and shares > 1:
            self._shared(team, shares, (*before, fresh.buffer_info()[0], *after))
        elif self._kernel(*before, fresh.buffer_info()[0], *after, torch.get_num_threads(), 0, 1):
            raise MemoryError(f"no memory for the scalars of {self._members} members")

    def _shared(self, team: Team, shares: int, arguments: Sequence[int | None]) -> None:
        """Run the step on the threads of ``team``, which each update one of the ``shares`` of the elements."""
        step = _SharedStep(self._address, *arguments, shares)
        try:
            team.run(_step_share(), ctypes.addressof(step), shares)
        except PieceError as error:
            raise MemoryError(str(error)) from None

    def _prepared(self, settings: Settings) -> tuple[tuple[int, ...], tuple[int | None, ...], tuple[int, ...] | None]:
        """Return the kernel's arguments before and after the gradients, and those of the function that counts steps."""
        sizes, params, state = (_start(values) for values in (self._sizes, *self._addresses))
        counts = _start(self._counts) if self._counts else None
        before = (len(self._sizes), self._members, len(settings.members), sizes, params)
        after = (state, settings.table.data_ptr(), counts, settings.bits)
        if counts is None:
            return before, after, None
        return before, after, (len(self._counts), self._members, counts, settings.advance.data_ptr())


class _SharedStep(ctypes.Structure):
    """The arguments of a step that threads share; the same struct as in `kernels.c`."""

    _fields_ = (
        ("kernel", _POINTER),
        *((name, _INTEGER) for name in ("tensors", "members", "stride")),
        *((name, _POINTER) for name in ("sizes", "params", "grads", "state", "columns", "counts")),
        *((name, _INTEGER) for name in ("flags", "shares")),
    )


@cache
def _step_share() -> int:
    kernels = library()
    assert not isinstance(kernels, str), kernels
    return ctypes.cast(kernels.step_share, _POINTER).value or 0


class FiniteCheck:
    """Check whether all numbers in tensors are finite; cheap if the tensors are of the kinds of the last call."""

    def __init__(self) -> None:
        self._count, self._guards = 0, tensor_guards(())

    def __call__(self, tensors: Sequence[Tensor]) -> bool | None:
        """Return whether all numbers are finite; None without a library, and unless all tensors are contiguous, on the
        CPU and of one dtype (float32 or float64).
        """
        if len(tensors) != self._count or not self._guards.check(*tensors):
            if not _is_readable(tensors):
                return None
            self._count, self._guards = len(tensors), tensor_guards(tensors)
            self._sizes = array("q", list(map(Tensor.numel, tensors)))
            self._kernel = _function(f"finite_{native.TYPES[tensors[0].dtype]}")
        # Named, so that it lives as long as the call.
        addresses = _addresses(tensors)
        return bool(self._kernel(self._count, _start(self._sizes), _start(addresses)))


def _is_readable(tensors: Sequence[Tensor]) -> bool:
    dtype = tensors[0].dtype
    if dtype not in native.TYPES or isinstance(library(), str):
        return False
    # The memory of a subclass is not where its data_ptr says.
    plain = all(type(tensor) is Tensor and tensor.layout is torch.strided for tensor in tensors)
    return plain and all(tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)


class MemoryPairs:
    """Pairs of tensors with equal contents; `all_equal` checks whether one of them has been written to."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        first, second = ([pair[side] for pair in pairs] for side in (0, 1))
        self._arrays = (
            _addresses(first),
            _addresses(second),
            array("q", [t.numel() * t.element_size() for t in second]),
        )
        self._arguments = (len(pairs), *map(_start, self._arrays))
        self._compare = _function("same")

    def all_equal(self) -> bool:
        """Return whether the contents of all pairs are equal. The tensors must still be at the same addresses."""
        return bool(self._compare(*self._arguments))


_ARGUMENTS = {
    "same": [_INTEGER, *[_POINTER] * 3],
    "advance": [_INTEGER] * 2 + [_POINTER] * 2,
    "finite": [_INTEGER, *[_POINTER] * 2],
}


@cache
def _function(name: str) -> Callable[..., int]:
    kernels = library()
    assert not isinstance(kernels, str), kernels
    function: Any = kernels[name]
    function.argtypes = _ARGUMENTS[name.partition("_")[0]]
    return function  # type: ignore[no-any-return]


def _stack_addresses(stacks: Sequence[Sequence[Tensor]]) -> tuple[array[int], array[int]]:
    """Return the addresses of the parameters, and those of all tensors of their state."""
    params, *state = stacks
    return _addresses(params), _addresses([tensor for stack in state for tensor in stack])


def _addresses(tensors: Sequence[Tensor]) -> array[int]:
    # Through a list: an array filled from an iterator is slower.
    return array("Q", list(map(Tensor.data_ptr, tensors)))


def _start(values: array[int]) -> int:
    return values.buffer_info()[0]

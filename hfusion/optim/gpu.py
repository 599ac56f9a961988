"""The kernels of ``triton_kernels.py``, on an accelerator.

triton comes with torch for CUDA (https://triton-lang.org). Where it is missing, the optimizers run their formulas
(``eager_steppers.py``), a launch for each operator; the environment variable ``HFUSION_NATIVE=0`` chooses that.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfusion.device.backend import backend
from hfusion.optim.device_numbers import DeviceNumbers, sent
from hfusion.optim.formula import Formula
from hfusion.optim.settings import Settings

# Bytes that a thread loads or stores at once, if all addresses are multiples of this number.
WIDTH = 16
# Largest number of sets of tensor addresses that are kept on the device.
_MAX_ADDRESS_SETS = 64


def library() -> Any:
    """Return the module of kernels, or the reason why there is none."""
    return "HFUSION_NATIVE=0" if os.environ.get("HFUSION_NATIVE") == "0" else _loaded()


@cache
def _loaded() -> Any:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return importlib.import_module("hfusion.optim.triton_kernels")


def plan(formula: type[Formula], stacks: Sequence[Sequence[Tensor]], counts: Sequence[Tensor]) -> TritonStepper | None:
    """The steps of ``formula`` for these stacks, see `TritonStepper`; None without Triton, or for other dtypes."""
    kernels = library()
    if isinstance(kernels, str) or stacks[0][0].dtype not in kernels.DTYPES:
        return None
    return TritonStepper(formula, stacks, counts)


class TritonStepper:
    """Like `hfusion.optim.native_kernels.NativeStepper`, for stacks on an accelerator.

    The ``counts`` stay on the CPU, where code that saves or copies members reads them. Kernels increment a copy on the
    device, which is overwritten if other code has written to ``counts``.
    """

    contiguous = True
    unrecordable = ""

    def __init__(self, formula: type[Formula], stacks: Sequence[Sequence[Tensor]], counts: Sequence[Tensor]) -> None:
        assert formula.kernel is not None
        first, kernels = stacks[0][0], library()
        self._kernel = getattr(kernels, formula.kernel)
        self._prepare = getattr(kernels, f"{formula.kernel}_scalars")
        self._device, self._dtype = first.device, first.dtype
        self._members = len(first)
        self._counts = list(counts)
        self._buffers = len(stacks) - 1
        sizes = [param.numel() // self._members for param in stacks[0]]
        self._sizes = sent(torch.tensor(sizes, device="cpu"), self._device)
        lanes = WIDTH // self._dtype.itemsize
        self._launches = [
            (size, sent(program_spots(sizes, indices, self._members, kernels.BLOCK), self._device))
            for size, indices in by_width(sizes, lanes).items()
        ]
        self._constants = {"BUFFERS": self._buffers, "dtype": kernels.DTYPES[self._dtype], "BLOCK": kernels.BLOCK}
        self._device_addresses: dict[tuple[int, ...], _Addresses] = {}
        self._settings: Settings | None = None
        self._table = DeviceNumbers(self._device, torch.float64)
        self._counted = DeviceNumbers(self._device, torch.float32)
        self._device_counts = self._counted.write_changed(torch.zeros(len(sizes), self._members, device="cpu"))
        numbers = kernels.SCALARS[formula.kernel]
        arithmetic = torch.promote_types(self._dtype, torch.float32)
        self._scalars = torch.empty((len(sizes), numbers, self._members), dtype=arithmetic, device=self._device)
        self._scalars_grid = (len(sizes), -(-self._members // kernels.ROWS))
        self._rows = kernels.ROWS
        self.move(stacks)

    def move(self, stacks: Sequence[Sequence[Tensor]]) -> None:
        """Continue with ``stacks``: the same tensors at other addresses."""
        self._params = self._at([tensor for stack in stacks for tensor in stack])

    def release(self) -> None:
        """Do nothing: this object holds addresses, not tensors."""

    @property
    def key(self) -> None:
        """None: the launches depend on nothing but the addresses of tensors."""
        return None

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts and update the tensors. ``grads``: one gradient for each parameter."""
        self.ready(grads, settings)
        self.launch(grads)

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts on the CPU, and copy numbers that have changed to the device."""
        self._grads = self._at(grads)
        advance = settings.advance[: self._members]
        if settings is not self._settings:
            self._settings = settings
            flags = torch.tensor([[float(bool(flag))] for flag in settings.options], dtype=torch.float64, device="cpu")
            rows = (settings.table[:, : self._members], advance.double()[None], flags.expand(-1, self._members))
            self._device_table = self._table.write_changed(torch.cat(rows))
        if self._counts:
            counts = torch.stack(self._counts)
            self._counted.write_changed(counts)
            torch._foreach_add_(self._counts, [advance] * len(self._counts))
            counts += advance

    def launch(self, grads: Sequence[Tensor]) -> object:
        """Launch the step, which also counts on the device; return what must stay alive while it may be replayed."""
        grad_addresses = self._grads
        # Triton launches on the current device. As in C, every operation rounds.
        with backend(self._device).current():
            self._prepare[self._scalars_grid](
                self._device_table,
                self._device_counts,
                self._scalars,
                self._members,
                ROWS=self._rows,
                enable_fp_fusion=False,
            )
            for lanes, spots in self._launches:
                self._kernel[(len(spots),)](
                    spots,
                    self._sizes,
                    len(self._sizes),
                    self._members,
                    self._params.tensor,
                    grad_addresses.tensor,
                    self._scalars,
                    **self._constants,
                    LANES=lanes if self._params.wide and grad_addresses.wide else 1,
                    enable_fp_fusion=False,
                )
        return grad_addresses, self._params

    def _at(self, tensors: Sequence[Tensor]) -> _Addresses:
        """Return addresses on the device. They are sent once and cached, because torch often reuses freed memory."""
        addresses = tuple(map(Tensor.data_ptr, tensors))
        entry = self._device_addresses.get(addresses)
        if entry is None:
            if len(self._device_addresses) == _MAX_ADDRESS_SETS:
                self._device_addresses.clear()
            tensor = sent(torch.tensor(addresses, dtype=torch.int64, device="cpu"), self._device)
            entry = self._device_addresses[addresses] = _Addresses(
                tensor, not any(address % WIDTH for address in addresses)
            )
        return entry


class _Addresses(NamedTuple):
    """Addresses of tensors, on the device; ``wide``: whether all are multiples of `WIDTH`."""

    tensor: Tensor
    wide: bool


def by_width(sizes: Sequence[int], lanes: int) -> dict[int, list[int]]:
    """Group the indices of non-empty tensors by the number of elements that a thread moves at once."""
    indices: dict[int, list[int]] = {}
    for index, size in enumerate(sizes):
        if size:
            indices.setdefault(1 if size % lanes else lanes, []).append(index)
    return indices


def program_spots(sizes: Sequence[int], indices: Sequence[int], members: int, block: int) -> Tensor:
    """Return tensor, member and block of each program for the tensors ``indices``: int32 ``[programs, 3]``."""
    pieces = [
        torch.cartesian_prod(
            torch.tensor([index], device="cpu"),
            torch.arange(members, device="cpu"),
            torch.arange(-(-sizes[index] // block), device="cpu"),
        )
        for index in indices
    ]
    return torch.cat(pieces).to(torch.int32)

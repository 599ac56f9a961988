"""The kernels of ``triton_kernels.py``, on an accelerator.

triton comes with torch for CUDA (https://triton-lang.org). Where it is missing, the optimizers run their formulas
(``stacked.py``), a launch for each operator; the environment variable ``HFUSION_NATIVE=0`` chooses that.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfusion.device.backend import backend
from hfusion.optim.formula import Formula
from hfusion.optim.settings import Settings

# Bytes that a thread loads or stores at once, if they lie at a multiple of as many.
_WIDTH = 16
# Places of tensors that a group remembers.
_MAX_TOLD = 64


def library() -> Any:
    """The module of kernels, or in words why there is none."""
    return "HFUSION_NATIVE=0" if os.environ.get("HFUSION_NATIVE") == "0" else _loaded()


@cache
def _loaded() -> Any:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return importlib.import_module("hfusion.optim.triton_kernels")


def plan(formula: type[Formula], stacks: Sequence[Sequence[Tensor]], counts: Sequence[Tensor]) -> TritonStepper | None:
    """The steps of ``formula`` for these stacks, see `TritonStepper`; None without Triton."""
    return None if isinstance(library(), str) else TritonStepper(formula, stacks, counts)


class TritonStepper:
    """As `hfusion.optim.native.TritonStepper`, for stacks on an accelerator; the ``counts`` stay on the CPU."""

    contiguous = True

    def __init__(self, formula: type[Formula], stacks: Sequence[Sequence[Tensor]], counts: Sequence[Tensor]) -> None:
        assert formula.kernel is not None
        first, kernels = stacks[0][0], library()
        self._formula = formula
        self._kernel = getattr(kernels, formula.kernel)
        self._device, self._dtype = first.device, first.dtype
        self._members = len(first)
        self._counts = counts
        self._buffers = len(stacks) - 1
        sizes = [param.numel() // self._members for param in stacks[0]]
        self._sizes = torch.tensor(sizes, device=self._device)
        lanes = _WIDTH // self._dtype.itemsize
        self._launches = [
            (size, _spots(sizes, which, self._members, kernels.BLOCK).to(self._device))
            for size, which in _by_width(sizes, lanes).items()
        ]
        self._constants = {"BUFFERS": self._buffers, "dtype": kernels.REALS[self._dtype], "BLOCK": kernels.BLOCK}
        self._told: dict[tuple[int, ...], _Addresses] = {}
        self._numbers: dict[int, tuple[Tensor, Tensor]] = {}
        self.move(stacks)

    def move(self, stacks: Sequence[Sequence[Tensor]]) -> None:
        """The same stacks lie elsewhere now."""
        self._params = self._at([tensor for stack in stacks for tensor in stack])

    def release(self) -> None:
        """Nothing: this knows where tensors lie, and holds none."""

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Count a step and make it. ``grads``: as the parameters."""
        if self._counts:
            advance = settings.advance[: self._members]
            torch._foreach_add_(list(self._counts), [advance] * len(self._counts))
        found = [self._sent(place, numbers) for place, numbers in enumerate(self._scalars(settings))]
        own = self._at(grads)
        for lanes, spots in self._launches:
            # Triton launches on the current device.
            with backend(self._device).current():
                self._kernel[(len(spots),)](
                    spots,
                    self._sizes,
                    len(self._sizes),
                    self._members,
                    self._params.there,
                    own.there,
                    *found,
                    **self._constants,
                    LANES=lanes if self._params.wide and own.wide else 1,
                    # As in C: every operation rounds.
                    enable_fp_fusion=False,
                )

    def _scalars(self, settings: Settings) -> tuple[Tensor, Tensor]:
        """What the kernel takes of numbers ``[counts, number, members]``, and where those of each tensor begin."""
        own, which = torch.ones(1, self._members), torch.zeros(len(self._sizes), dtype=torch.int64)
        if self._counts:
            own, which = torch.unique(torch.stack(list(self._counts)), dim=0, return_inverse=True)
        names = SimpleNamespace(step=own.double())
        found = self._formula.scalars(settings.vectors_of(self._members), settings.options, names)
        whole = [
            torch.full_like(names.step, self._formula.left_out.get(name, 0.0)) if value is None else value
            for name, value in found.items()
        ]
        whole = [value.expand(own.shape) for value in whole]
        scalars = torch.stack(whole, dim=1).to(self._dtype)
        return scalars, which * (scalars.numel() // len(own))

    def _sent(self, place: int, numbers: Tensor) -> Tensor:
        """Numbers of a step on the device, to which they go when they are not those of the step before."""
        found = self._numbers.get(place)
        # By their bits: a zero has a sign.
        if found is None or not torch.equal(found[0].view(torch.uint8), numbers.view(torch.uint8)):
            found = self._numbers[place] = numbers, numbers.to(self._device, non_blocking=True)
        return found[1]

    def _at(self, tensors: Sequence[Tensor]) -> _Addresses:
        """Where tensors lie; the device is told once, as memory that was let go is often taken again."""
        addresses = tuple(map(Tensor.data_ptr, tensors))
        found = self._told.get(addresses)
        if found is None:
            if len(self._told) == _MAX_TOLD:
                self._told.clear()
            there = torch.tensor(addresses, dtype=torch.int64).to(self._device, non_blocking=True)
            found = self._told[addresses] = _Addresses(there, not any(address % _WIDTH for address in addresses))
        return found


class _Addresses(NamedTuple):
    """Addresses, on the device; ``wide``: multiples of `_WIDTH`."""

    there: Tensor
    wide: bool


def _by_width(sizes: Sequence[int], lanes: int) -> dict[int, list[int]]:
    """The tensors that are not empty, by how many elements of a member's row are moved at once."""
    found: dict[int, list[int]] = {}
    for index, size in enumerate(sizes):
        if size:
            found.setdefault(1 if size % lanes else lanes, []).append(index)
    return found


def _spots(sizes: Sequence[int], which: Sequence[int], members: int, block: int) -> Tensor:
    """Tensor, member and block of each program for the tensors ``which``: int32 ``[programs, 3]``."""
    pieces = [
        torch.cartesian_prod(torch.tensor([index]), torch.arange(members), torch.arange(-(-sizes[index] // block)))
        for index in which
    ]
    return torch.cat(pieces).to(torch.int32)

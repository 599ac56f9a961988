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
from typing import Any

import torch
from torch import Tensor

from hfusion.device.backend import backend
from hfusion.optim.formula import Formula
from hfusion.optim.settings import Settings


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
        self._spots = _spots(sizes, self._members, kernels.BLOCK).to(self._device)
        self._constants = {"BUFFERS": self._buffers, "dtype": kernels.REALS[self._dtype], "BLOCK": kernels.BLOCK}
        self._grads: tuple[list[int], Tensor] | None = None
        self.move(stacks)

    def move(self, stacks: Sequence[Sequence[Tensor]]) -> None:
        """The same stacks lie elsewhere now."""
        self._params = torch.tensor([_addresses(stack) for stack in stacks], device=self._device)

    def release(self) -> None:
        """Nothing: this knows where tensors lie, and holds none."""

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Count a step and make it. ``grads``: as the parameters."""
        if self._counts:
            advance = settings.advance[: self._members]
            torch._foreach_add_(list(self._counts), [advance] * len(self._counts))
        scalars, begins = self._scalars(settings)
        if not len(self._spots):
            return
        # Triton launches on the current device.
        with backend(self._device).current():
            self._kernel[(len(self._spots),)](
                self._spots,
                self._sizes,
                len(self._sizes),
                self._members,
                self._params,
                self._at(grads),
                scalars.to(self._device, non_blocking=True),
                begins.to(self._device, non_blocking=True),
                **self._constants,
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

    def _at(self, grads: Sequence[Tensor]) -> Tensor:
        """Where the gradients lie, which is often where they lay before."""
        found = _addresses(grads)
        if self._grads is None or self._grads[0] != found:
            self._grads = found, torch.tensor(found).to(self._device, non_blocking=True)
        return self._grads[1]


def _spots(sizes: Sequence[int], members: int, block: int) -> Tensor:
    """Tensor, member and block of each program: int32 ``[programs, 3]``."""
    pieces = [
        torch.cartesian_prod(torch.tensor([index]), torch.arange(members), torch.arange(-(-size // block)))
        for index, size in enumerate(sizes)
    ]
    return torch.cat(pieces).to(torch.int32)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))

"""The kernels of ``triton_kernels.py``, on a CUDA device.

triton comes with torch for CUDA (https://triton-lang.org). Where it is missing, torch's kernels run row by row
(``rows.py``), one launch for each run of members with equal hyper-parameters; the environment variable
``HFUSION_NATIVE=0`` chooses that.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hfusion.device.backend import backend
from hfusion.optim.settings import Flags, Settings

Scalars: TypeAlias = Callable[[Tensor, Tensor, Flags], list[Tensor]]
"""From hyper-parameters ``[hyper, members]``, numbers of the step and flags to what a kernel reads, all float64."""


def _sgd(table: Tensor, counts: Tensor, flags: Flags) -> list[Tensor]:
    lr, momentum, dampening, decay = table
    nesterov, maximize = flags
    first = (counts == 1).to(lr)
    return [_sign(lr, maximize), lr, decay, momentum, 1 - dampening, first, torch.full_like(lr, nesterov)]


def _adam(table: Tensor, counts: Tensor, flags: Flags) -> list[Tensor]:
    return _moments(table, counts, flags, table[4], torch.ones_like(table[0]))


def _adamw(table: Tensor, counts: Tensor, flags: Flags) -> list[Tensor]:
    lr, decay = table[0], table[4]
    return _moments(table, counts, flags, torch.zeros_like(lr), 1 - lr * decay)


def _moments(table: Tensor, counts: Tensor, flags: Flags, decay: Tensor, shrink: Tensor) -> list[Tensor]:
    lr, beta1, beta2, eps, _ = table
    near = 1 - beta1 < 0.5
    toward = torch.where(near, 1 - beta1, -beta1)
    scale, step = (1 - beta2**counts).rsqrt(), lr / (1 - beta1**counts)
    return [_sign(lr, flags[1]), decay, shrink, near.to(lr), toward, beta2, 1 - beta2, scale, eps, step]


def _adadelta(table: Tensor, counts: Tensor, flags: Flags) -> list[Tensor]:
    lr, rho, eps, decay = table
    return [_sign(lr, flags[0]), lr, decay, rho, 1 - rho, eps]


def _sign(like: Tensor, maximize: bool) -> Tensor:
    return torch.full_like(like, -1 if maximize else 1)


_KERNELS: Mapping[str, tuple[str, Scalars]] = {
    "sgd": ("sgd", _sgd),
    "adam": ("adam", _adam),
    "adamw": ("adam", _adamw),
    "adadelta": ("adadelta", _adadelta),
}


def library() -> Any:
    """The module of kernels, or in words why there is none."""
    return "HFUSION_NATIVE=0" if os.environ.get("HFUSION_NATIVE") == "0" else _loaded()


@cache
def _loaded() -> Any:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return importlib.import_module("hfusion.optim.triton_kernels")


def plan(name: str, stacks: Sequence[Sequence[Tensor]], counts: Tensor | None) -> Plan | None:
    """The steps of optimizer ``name`` for these stacks, see `Plan`; None without Triton."""
    return None if isinstance(library(), str) else Plan(name, stacks, counts)


class Plan:
    """As `hfusion.optim.native.Plan`, for stacks on a CUDA device; the ``counts`` stay on the CPU."""

    def __init__(self, name: str, stacks: Sequence[Sequence[Tensor]], counts: Tensor | None) -> None:
        first, kernels = stacks[0][0], library()
        kernel, self._scalars = _KERNELS[name]
        self._kernel = getattr(kernels, kernel)
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

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Count a step and make it. ``grads``: as the parameters."""
        table, counts = settings.table[:, : self._members], torch.ones(self._members)
        if self._counts is not None:
            self._counts.add_(settings.advance[: self._members])
            counts = self._counts[0, 0].reshape(-1)
        scalars = torch.stack(self._scalars(table, counts.double(), settings.flags)).to(self._dtype)
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
                **self._constants,
                # As in C: every operation rounds.
                enable_fp_fusion=False,
            )

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

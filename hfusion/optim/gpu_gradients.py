"""Norms and products of stacked gradients on an accelerator, in as many launches for many tensors as for few."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from hfusion.device.backend import backend, is_recorded
from hfusion.optim.device_numbers import sent
from hfusion.optim.gpu import WIDTH, by_width, library, program_spots

ORDERS = {1.0: 1, 2.0: 2, math.inf: 0}
"""Norms that the kernels compute, and what they call them."""


class StackedGradients:
    """Gradients ``[members, ...]`` on one accelerator, in separate memory. Made by `on_accelerator`."""

    def __init__(self, grads: Sequence[Tensor], members: int, tables: _GradientTables) -> None:
        self._grads, self._members, self._tables = grads, members, tables
        self._device = grads[0].device
        addresses = [grad.data_ptr() for grad in grads]
        self._wide = not any(address % WIDTH for address in addresses)
        self._addresses = sent(torch.tensor(addresses, dtype=torch.int64, device="cpu"), self._device)

    def norms(self, norm_type: float) -> Tensor:
        """Return the norms ``[tensors, members]``, each rounded to the dtype of its gradient, in that of all."""
        tables, kernels = self._tables, library()
        dtype = reduce(torch.promote_types, (grad.dtype for grad in self._grads))
        norms = torch.empty(len(self._grads), self._members, dtype=dtype, device=self._device)
        arithmetic = torch.promote_types(dtype, torch.float32)
        partials = torch.empty(tables.programs, dtype=arithmetic, device=self._device)
        constants: dict[str, Any] = {"ORDER": ORDERS[norm_type], "BLOCK": kernels.BLOCK, "enable_fp_fusion": False}
        # Triton launches on the current device.
        with backend(self._device).current():
            for part, lanes, spots in self._launches():
                arguments = (spots, tables.sizes, self._addresses, tables.firsts, partials)
                kernels.partial_norms[(len(spots),)](*arguments, dtype=part.dtype, LANES=lanes, **constants)
            for part in tables.parts:
                kernels.row_norms[(len(part.indices), self._members)](
                    part.indices,
                    tables.sizes,
                    tables.firsts,
                    partials,
                    norms,
                    self._members,
                    dtype=part.dtype,
                    **constants,
                )
        return norms

    def scale(self, factors: Tensor) -> None:
        """Multiply by ``factors [members]``, rounded to the dtype of each gradient."""
        kernels = library()
        torch.autograd.graph.increment_version(self._grads)
        with backend(self._device).current():
            for part, lanes, spots in self._launches():
                kernels.scale_rows[(len(spots),)](
                    spots,
                    self._tables.sizes,
                    self._addresses,
                    factors,
                    dtype=part.dtype,
                    BLOCK=kernels.BLOCK,
                    LANES=lanes,
                    enable_fp_fusion=False,
                )

    def _launches(self) -> list[tuple[_SameDtype, int, Tensor]]:
        return [
            (part, lanes if self._wide else 1, spots)
            for part in self._tables.parts
            for lanes, spots in part.spots.items()
        ]


def on_accelerator(grads: Sequence[Tensor], members: int) -> StackedGradients | None:
    """Return gradients for which there are kernels; None without Triton, for other dtypes, and on several devices.

    Members must lie one behind the other, in any order of the other dims, and no two gradients in the same memory.
    None, too, while user code captures a graph of the device, which would repeat the copy of today's addresses.
    """
    kernels, device = library(), grads[0].device
    if isinstance(kernels, str) or torch.compiler.is_compiling() or not backend(device).fuses:
        return None
    apart = len({grad.data_ptr() for grad in grads}) == len(grads)
    alike = all(grad.device == device and grad.dtype in kernels.DTYPES and _rows_apart(grad) for grad in grads)
    if not (apart and alike) or is_recorded(device):
        return None
    tables = _tables(device, members, tuple((grad.numel() // members, grad.dtype) for grad in grads))
    for table in tables.tables():
        # Another stream may have made it.
        backend(device).share(table)
    return StackedGradients(grads, members, tables)


def _rows_apart(grad: Tensor) -> bool:
    """Return whether the elements of each member lie together, without gaps, and the members in their order."""
    if grad.is_contiguous():
        return True
    order = sorted(range(grad.dim()), key=grad.stride, reverse=True)
    return (order[0] == 0 or len(grad) == 1) and grad.permute(order).is_contiguous()


@dataclass(frozen=True, eq=False)
class _SameDtype:
    """Gradients of one dtype, ``dtype`` as Triton calls it.

    ``indices``: int32, of the gradients. ``spots``: by the elements that a thread moves at once, for the kernels.
    """

    dtype: Any
    indices: Tensor
    spots: Mapping[int, Tensor]


@dataclass(frozen=True, eq=False)
class _GradientTables:
    """Gradients of these sizes and dtypes, wherever they lie, as the kernels take them.

    ``programs``: the number of all blocks of all rows.
    """

    sizes: Tensor
    firsts: Tensor
    programs: int
    parts: Sequence[_SameDtype]

    def tables(self) -> list[Tensor]:
        """Return all that lies on the device."""
        return [
            self.sizes,
            self.firsts,
            *(table for part in self.parts for table in (part.indices, *part.spots.values())),
        ]


@lru_cache(maxsize=16)
def _tables(device: torch.device, members: int, kinds: tuple[tuple[int, torch.dtype], ...]) -> _GradientTables:
    """Return the tables of gradients with these elements of a member and dtypes; any stream may read them."""
    kernels = library()
    sizes = [size for size, _ in kinds]
    counts = torch.tensor([members * -(-size // kernels.BLOCK) for size in sizes], device="cpu")
    parts = []
    for dtype in dict.fromkeys(dtype for _, dtype in kinds):
        indices = [index for index, (_, grad_dtype) in enumerate(kinds) if grad_dtype is dtype]
        groups = by_width([sizes[index] for index in indices], WIDTH // dtype.itemsize)
        spots = {
            lanes: program_spots(sizes, [indices[index] for index in group], members, kernels.BLOCK).to(device)
            for lanes, group in groups.items()
        }
        parts.append(
            _SameDtype(kernels.DTYPES[dtype], torch.tensor(indices, dtype=torch.int32, device="cpu").to(device), spots)
        )
    firsts = counts.cumsum(0) - counts
    return _GradientTables(torch.tensor(sizes, device="cpu").to(device), firsts.to(device), int(counts.sum()), parts)

"""Values that cross cuts: nests of tensors and numbers, moved storage by storage so that strides and sharing survive.

Bit for bit the same training needs the same strides: a product reads a transposed operand by another kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfusion.nest import change, leaves
from hfusion.runtime.copying import Move


@dataclass(frozen=True)
class View:
    """A tensor within the storage number ``storage`` of a bundle."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True)
class Bundle:
    """Values at rest on the host: their storages as bytes, and the values with a `View` for every tensor."""

    storages: tuple[Tensor, ...]
    values: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        return sum(storage.numel() for storage in self.storages)


def spill(values: Mapping[str, Any], *, pinned: bool) -> tuple[Bundle, list[Move]]:
    """Room for ``values`` on the host, and what must be copied there.

    Tensors that share a storage share it again when restored.
    """
    numbers: dict[int, int] = {}
    storages: list[Tensor] = []
    moves: list[Move] = []

    def view(tensor: Tensor) -> View:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in numbers or not storage.nbytes():
            numbers[storage.data_ptr()] = len(storages)
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = torch.empty(raw.shape, dtype=torch.uint8, pin_memory=pinned)
            storages.append(host)
            moves.append((host, raw))
        return View(
            numbers[storage.data_ptr()],
            tensor.dtype,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
        )

    kept = {name: change(value, Tensor, view) for name, value in values.items()}
    return Bundle(tuple(storages), kept), moves


def restore(bundle: Bundle, names: list[str], device: torch.device) -> tuple[dict[str, Any], list[Move]]:
    """The values named, on ``device``, detached, and what must be copied there; only their storages move."""
    moved: dict[int, Tensor] = {}
    moves: list[Move] = []

    def tensor(view: View) -> Tensor:
        if view.storage not in moved:
            host = bundle.storages[view.storage]
            moved[view.storage] = torch.empty(host.shape, dtype=torch.uint8, device=device)
            moves.append((moved[view.storage], host))
        storage = moved[view.storage].untyped_storage()
        found = torch.empty(0, dtype=view.dtype, device=device).set_(storage, view.offset, view.size, view.stride)
        return found.requires_grad_(view.requires_grad)

    return {name: change(bundle.values[name], View, tensor) for name in names}, moves


def detached(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without their graph, still telling which tensors need a gradient: new leaves."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return {name: change(value, Tensor, leaf) for name, value in values.items()}


def tracked(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that need a gradient, by the name of their value and their place in it."""
    return {
        f"{name} #{index}": leaf
        for name, value in values.items()
        for index, leaf in enumerate(leaves(value, Tensor))
        if leaf.requires_grad
    }

"""Values that cross cuts: nests of tensors and numbers, moved storage by storage so that strides and sharing survive.

Results that are equal bit for bit need equal strides: a matmul uses another kernel for a transposed operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hfusion.core.tree import contains, leaves, map_leaves
from hfusion.runtime.copying import Move


class StorageView(NamedTuple):
    """A tensor as a view of a bundle's storage. ``storage``: the index of that storage."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True)
class Bundle:
    """Values on the host: their storages, and nested values with a `StorageView` in place of each tensor."""

    storages: tuple[torch.UntypedStorage, ...]
    values: Mapping[str, Any]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the storages."""
        return tuple(storage.nbytes() for storage in self.storages)

    @cached_property
    def comparable(self) -> bool:
        """True if equality implies identical bits, which does not hold for 0.0 and -0.0."""
        return not contains(self.values, (float, complex))


def spill(values: Mapping[str, Any], before: Bundle | None, *, pinned: bool) -> tuple[Bundle, list[Move]]:
    """Allocate host memory for ``values``. Return the bundle, and the copies that fill it.

    Tensors that share a storage share it again when restored. ``before``: a bundle that is not needed any more. If its
    layout is the same, it is reused and returned.
    """
    numbers: dict[int, int] = {}
    sources: list[torch.UntypedStorage] = []
    sizes: list[int] = []

    def view(tensor: Tensor) -> StorageView:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        number = numbers.get(address) if size else None
        if number is None:
            number = numbers[address] = len(sources)
            sources.append(storage)
            sizes.append(size)
        offset = int(tensor.storage_offset())
        return StorageView(number, tensor.dtype, offset, tensor.shape, tensor.stride(), tensor.requires_grad)

    views = {name: map_leaves(value, Tensor, view) for name, value in values.items()}
    if before is not None and before.comparable and before.sizes == tuple(sizes) and before.values == views:
        bundle = before
    else:
        buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned, device="cpu") for size in sizes]
        bundle = Bundle(tuple(buffer.untyped_storage() for buffer in buffers), views)
    return bundle, list(map(Move, bundle.storages, sources))


def restore(bundle: Bundle, names: Sequence[str], device: torch.device) -> tuple[dict[str, Any], list[Move]]:
    """Allocate some values of a bundle on a device, detached. Return them, and the copies that fill them."""
    moved: dict[int, torch.UntypedStorage] = {}

    def tensor(view: StorageView) -> Tensor:
        storage = moved.get(view.storage)
        if storage is None:
            size = bundle.sizes[view.storage]
            storage = moved[view.storage] = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        result = torch.empty(0, dtype=view.dtype, device=device).set_(storage, view.offset, view.size, view.stride)
        return result.requires_grad_(view.requires_grad)

    values = {name: map_leaves(bundle.values[name], StorageView, tensor) for name in names}
    return values, [Move(target, bundle.storages[number]) for number, target in moved.items()]


def detached(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with tensors detached from their graph, as new leaves with the same ``requires_grad``."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return {name: map_leaves(value, Tensor, leaf) for name, value in values.items()}


def tracked(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that require a gradient, by the name of their value and their index in it."""
    return {
        f"{name} #{index}": leaf
        for name, value in values.items()
        for index, leaf in enumerate(leaves(value, Tensor))
        if leaf.requires_grad
    }


def forgetting() -> saved_tensors_hooks:
    """Context manager: autograd saves no tensors, since no backward will follow."""
    return saved_tensors_hooks(lambda tensor: None, _never)


def _never(packed: object) -> Tensor:
    raise AssertionError("a graph that kept nothing was walked")

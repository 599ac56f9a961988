"""Tensors that eager fallbacks get in the memory of an array, and detection of code that addresses raw memory.

The storage of a tensor in an array holds the values of all members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hfusion.core.layout import Listed
from hfusion.core.memory import is_plain

# Functions that take a storage offset, with the position of that argument. Without it they use the tensor's own offset.
_PLACED: Mapping[str, int] = {
    "as_strided": 3,
    "as_strided_": 3,
    "as_strided_copy": 3,
    "as_strided_scatter": 4,
}
# Functions that return or replace the storage itself, or return the tensor's offset in it.
_MEMORY = frozenset({"storage", "untyped_storage", "storage_offset", "set_"})


class AddressWatch(TorchFunctionMode):
    """While active, call ``on_access`` whenever code accesses a storage or passes a storage offset."""

    def __init__(self, on_access: Callable[[], None]) -> None:
        super().__init__()
        self._on_access = on_access

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        offset_index = _PLACED.get(name)
        passes_offset = offset_index is not None and (
            len(args) > offset_index or kwargs.get("storage_offset") is not None
        )
        if passes_offset or name in _MEMORY:
            self._on_access()
        return func(*args, **kwargs)


class _CopyToOwnMemory(torch.autograd.Function):
    """Copy values and gradients to separate memory: torch's derivatives of these functions address memory, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.clone()


def own_memory(tensor: Tensor) -> Tensor:
    """Return a differentiable copy of ``tensor`` in a separate storage."""
    copied: Tensor = _CopyToOwnMemory.apply(tensor)  # type: ignore[no-untyped-call]
    return copied


def fills_memory(tensor: Tensor) -> bool:
    """Return whether ``tensor`` takes up all bytes of its storage."""
    return (
        tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


def own_rows(column: Any, members: int) -> Sequence[Tensor]:
    """Return one tensor per member in the memory of ``column``, each with its own version and autograd history."""
    rows = tuple(column) if isinstance(column, Listed) else (column,) * members
    if not all(is_plain(row) for row in rows):
        return rows
    if torch.is_grad_enabled() and any(row.requires_grad for row in rows):
        aliases: Sequence[Tensor] = _ApartFromMemory.apply(*rows)  # type: ignore[no-untyped-call]
        return aliases
    return [_alias(row).requires_grad_(row.requires_grad) for row in rows]


def own_leaves(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return ``weights``, or, while gradients are off, detached leaves of them: forward may switch gradients on."""
    if torch.is_grad_enabled():
        return weights
    leaves: dict[int, Tensor] = {}
    return [leaves.setdefault(id(w), w.detach().requires_grad_(w.requires_grad)) for w in weights]


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor in the memory of ``tensor`` that autograd treats as unrelated, not as a view."""
    with torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


class _ApartFromMemory(torch.autograd.Function):
    """Returns an alias of each row, see `_alias`, and passes gradients on unchanged."""

    @staticmethod
    def forward(ctx: Any, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(map(_alias, rows))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads

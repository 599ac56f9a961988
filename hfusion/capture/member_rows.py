"""The tensors that a member's own code gets in the memory of an array, with versions and a history of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.core.layout import Listed
from hfusion.core.memory import is_plain


def own_rows(column: Any, members: int) -> Sequence[Tensor]:
    """Tensors for the members in the memory of ``column``, each with a version and a history of its own."""
    rows = tuple(column) if isinstance(column, Listed) else (column,) * members
    if not all(is_plain(row) for row in rows):
        return rows
    if torch.is_grad_enabled() and any(row.requires_grad for row in rows):
        found: Sequence[Tensor] = _ApartFromMemory.apply(*rows)  # type: ignore[no-untyped-call]
        return found
    return [_alias(row).requires_grad_(row.requires_grad) for row in rows]


def own_leaves(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """While gradients are off, leaves as a parameter alone is one: forward may switch them on for itself."""
    if torch.is_grad_enabled():
        return weights
    once: dict[int, Tensor] = {}
    return [once.setdefault(id(w), w.detach().requires_grad_(w.requires_grad)) for w in weights]


def _alias(tensor: Tensor) -> Tensor:
    """The memory of ``tensor`` in a tensor that is no view of it: autograd takes them for strangers."""
    with torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


class _ApartFromMemory(torch.autograd.Function):
    """Each tensor in its own memory, with gradients as they come."""

    @staticmethod
    def forward(ctx: Any, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(map(_alias, rows))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads

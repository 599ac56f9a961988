"""Find out whether other tensors use the memory of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["has_views"]


def has_views(tensor: Tensor) -> bool:
    """Return whether another tensor uses the memory of ``tensor``."""
    return _uses(tensor) > _uses(torch.empty(1, device="cpu"))


def _uses(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

"""Sets of members as the bits of a number: unions of small tensors take longer than a node of autograd."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def mask_of(members: Iterable[int]) -> int:
    """Return the bit mask of ``members``."""
    return sum(1 << member for member in members)


def rows_of_mask(mask: int, members: int) -> Tensor:
    """Return a set of members as bool ``[members]``."""
    return torch.tensor([bool(mask >> member & 1) for member in range(members)], dtype=torch.bool, device="cpu")

"""Differences between tensors, computed in float64 in pieces that stay in the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Number of elements that are compared at a time in host memory.
PIECE = 1 << 17


def norm(tensor: Tensor) -> float:
    """Return the norm of the finite elements of a tensor."""
    return math.hypot(*map(_finite_norm, map(_widened, _pieces(tensor))))


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference of two tensors of one shape."""
    pieces = zip(_pieces(actual), _pieces(expected), strict=True)
    return math.hypot(*(float(torch.linalg.vector_norm(_widened(piece) - _widened(other))) for piece, other in pieces))


def relative_difference(actual: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the distance divided by the norm of ``expected``, or by ``least`` if that is larger.

    Equal infinities count as equal, as do two NaNs. The result is infinite if a value that is not finite differs from
    its counterpart.
    """
    gap = distance(actual, expected)
    if not math.isfinite(gap):
        equal = (actual == expected) | ((actual != actual) & (expected != expected))
        if bool((~equal & ~(actual.isfinite() & expected.isfinite())).any()):
            return math.inf
        gap = distance(*(torch.where(equal, torch.zeros_like(tensor), tensor) for tensor in (actual, expected)))
    return 0.0 if gap == 0.0 else gap / max(norm(expected), least, torch.finfo(expected.dtype).tiny)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    flat = tensor.detach().reshape(-1)
    return flat.split(PIECE) if tensor.is_cpu else (flat,)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _finite_norm(wide: Tensor) -> float:
    size = float(torch.linalg.vector_norm(wide))
    if math.isfinite(size):
        return size
    return float(torch.linalg.vector_norm(torch.where(wide.isfinite(), wide, torch.zeros_like(wide))))

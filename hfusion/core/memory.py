"""Memory ranges of tensors, and comparison of their values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.core.parameter_attributes import user_class
from hfusion.torch_private.dispatch_modes import is_wrapped


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain strided one, without a subclass or wrapper."""
    is_known = type(tensor) in (Tensor, nn.Parameter) or user_class(tensor) is not None
    return is_known and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among the leaves of nested containers."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def real_view(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, in the same memory; other tensors as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def has_address(tensor: Tensor) -> bool:
    """Return whether the elements of ``tensor`` lie at an address of this process, where a kernel can read and write.

    Subclasses of Tensor that only add methods have one. Those with a ``__torch_dispatch__`` of their own (DTensor,
    FakeTensor, quantized tensors) keep their values elsewhere or nowhere, as do tensors on the meta device and those of
    a transform of torch.func.
    """
    kind = type(tensor)
    if kind not in (Tensor, nn.Parameter) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return tensor.layout is torch.strided and not tensor.is_meta and not is_wrapped(tensor)


def version_of(tensor: Tensor) -> int:
    """Return the number of writes into ``tensor`` that autograd knows of; 0 for one that has no such number."""
    return 0 if tensor.is_inference() else tensor._version


def same_values(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal in value, shape and dtype; NaN equals NaN."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    tensor, other = tensor.detach(), other.detach()
    return bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit: NaN equals the same NaN, and 0.0 differs from -0.0."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    real = [torch.view_as_real(x.detach()) if x.is_complex() else x.detach() for x in (tensor, other)]
    return torch.equal(*(x.view(_BITS[x.element_size()]) for x in real))


def overlap(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two plain tensors overlap in memory."""
    if not (is_plain(tensor) and is_plain(other) and tensor.device == other.device):
        return False
    if not (tensor.numel() and other.numel()):
        return False
    (first, end), (start, last) = _extent(tensor), _extent(other)
    if not (first < last and start < end):
        return False
    same_storage = tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    if (tensor.is_contiguous() and other.is_contiguous()) or tensor.dtype != other.dtype or not same_storage:
        return True
    # Ranges of memory may interleave without an overlap, as columns of a matrix do.
    first_offset = min(tensor.storage_offset(), other.storage_offset())
    covered = torch.zeros((max(end, last) - min(first, start)) // tensor.element_size(), dtype=torch.bool, device="cpu")
    covered.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - first_offset).fill_(True)
    return bool(covered.as_strided(other.size(), other.stride(), other.storage_offset() - first_offset).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the dims of ``tensor``, largest stride first; None if no order of the dims makes it contiguous."""
    if tensor.layout is not torch.strided:
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


# Differences between tensors, computed in float64 in pieces that stay in the processor's cache.

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
        gap = distance(*(torch.where(equal, torch.zeros_like(tensor), tensor) for tensor in (actual, expected)))
    if not math.isfinite(gap):
        return math.inf
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

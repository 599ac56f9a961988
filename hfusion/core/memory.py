"""Memory ranges of tensors, comparison of their values, and copies of a module's arguments."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.core.membership import keep_marks, user_class
from hfusion.core.python_values import SCALARS
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


def lies_within(tensor: Tensor, whole: Tensor) -> bool:
    """Return whether ``tensor`` begins in the memory of ``whole``, as its rows do, whose storages are other objects."""
    return has_address(tensor) and 0 <= tensor.data_ptr() - whole.data_ptr() < whole.nbytes


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
    if tensor.device != other.device or not all(is_plain(one) and one.numel() for one in (tensor, other)):
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
    _, start, end = _span(tensor)
    return tensor.data_ptr(), tensor.data_ptr() + (end - start) * tensor.element_size()


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


# Copies of a module's arguments, so that running user code does not change the originals.
#
# Use `copies` for runs that write to arguments, `aliases` and `contiguous_aliases` for tracers, which write no values
# but set attributes, and `copies_in_like_memory` for code whose result may depend on which tensors share memory.

_CONTAINERS = (OrderedDict, dict, list, set)
_TENSORS = ("_parameters", "_buffers")


def copies(values: Any) -> Any:
    """Return nested ``values`` with each tensor copied to a leaf of its own, with the same ``requires_grad``.

    Strides are kept, since code may read them.
    """
    return pytree.tree_map_only(Tensor, lambda x: copies_in_like_memory([x])[0], values)


def aliases(values: Any) -> Any:
    """Return nested ``values`` with each tensor replaced by another tensor object in the same memory."""
    return pytree.tree_map_only(Tensor, lambda x: _like(x.detach(), x), values)


def contiguous_aliases(values: Any) -> Any:
    """Return nested ``values`` with other, contiguous tensor objects, in the same memory if they were contiguous."""
    return pytree.tree_map_only(Tensor, lambda x: _like(x.detach().contiguous(), x), values)


def module_copy(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy in the same train and eval modes; ``memo`` is that of `copy.deepcopy`.

    `copy.deepcopy` alone loses attributes that users have set on parameters and buffers, and believes a class that
    copies itself: its ``__deepcopy__`` may ignore the memo, which says by what to replace a tensor, and its
    ``__setstate__`` may call ``__init__``, which loses modes and other values. Such modules are copied by attributes.
    """
    memo = {} if memo is None else memo
    # Most attributes of a module are empty tables of hooks, on which deepcopy spends two thirds of its time.
    for part in module.modules():
        for value in vars(part).values():
            if type(value) in _CONTAINERS and not value:
                memo.setdefault(id(value), type(value)())
    before = dict(memo)
    copied = None
    # A class's own copying may also need values, which the tensors of a skeleton do not have.
    with suppress(Exception):
        copied = copy.deepcopy(module, memo)
    if copied is None or not _is_exact(copied, module, memo):
        parts = [p for p in module.modules() if id(p) not in before and not isinstance(p, torch.jit.ScriptModule)]
        # In place, since the caller may copy more by this memo.
        memo.clear()
        memo.update(before)
        # A GraphModule's own __new__ makes another class, without forward.
        memo.update((id(part), object.__new__(type(part))) for part in parts)
        for part in parts:
            vars(memo[id(part)]).update(copy.deepcopy(vars(part), memo))
        copied = memo[id(module)]
    for tensor in (*module.parameters(), *module.buffers()):
        if (tensor_copy := memo.get(id(tensor), tensor)) is not tensor:
            keep_marks(tensor_copy, tensor, memo)
    return copied


def _is_exact(copied: nn.Module, module: nn.Module, memo: Mapping[int, Any]) -> bool:
    """Return whether a copy has the tensors that ``memo`` gives for those of ``module``, its plain values and hooks."""
    copies = dict(copied.named_modules(remove_duplicate=False))
    return all(
        path in copies
        and all(
            _is_kept(name, value, vars(copies[path]), memo)
            for name, value in vars(part).items()
            # Classes of torch keep ids and caches of an object in private attributes.
            if name in _TENSORS or not (name.startswith("_") and type(part).__module__.startswith("torch."))
        )
        for path, part in module.named_modules(remove_duplicate=False)
        if not isinstance(part, torch.jit.ScriptModule)
    )


def _is_kept(name: str, value: Any, copied: Mapping[str, Any], memo: Mapping[int, Any]) -> bool:
    other = copied.get(name, memo)
    if name in _TENSORS:
        expected = {key: None if tensor is None else memo.get(id(tensor)) for key, tensor in value.items()}
        return other.keys() == expected.keys() and all(other[key] is expected[key] for key in expected)
    if type(value) is OrderedDict:
        return len(other) == len(value)
    if type(value) not in (dict, list, tuple, *SCALARS):
        return True
    return not all(type(leaf) in SCALARS for leaf in pytree.tree_leaves(value)) or bool(other == value)


def copies_in_like_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies with the same strides, dtypes and ``requires_grad``; copies share memory if the originals do."""
    spans = {k: _span(tensor) for k, tensor in enumerate(tensors) if is_plain(tensor) and tensor.numel()}
    # Tensors whose stretches of memory overlap. Each stretch is copied once, but not the whole storage, which may be a
    # data set.
    groups: list[list[int]] = []
    for k in sorted(spans, key=spans.__getitem__):
        group = groups[-1] if groups else []
        if group and spans[group[0]][0] == spans[k][0] and spans[k][1] < max(spans[g][2] for g in group):
            group.append(k)
        else:
            groups.append([k])
    copied: dict[int, Tensor] = {}
    for group in groups:
        start, end = spans[group[0]][1], max(spans[k][2] for k in group)
        memory = tensors[group[0]].detach().as_strided((end - start,), (1,), start).clone()
        copied |= {k: memory.as_strided(tensors[k].shape, tensors[k].stride(), spans[k][1] - start) for k in group}
    rows = [copied[k] if k in copied else tensor.detach().clone() for k, tensor in enumerate(tensors)]
    copy_by_id: dict[int, Tensor] = {}
    return [copy_by_id.setdefault(id(t), _like(row, t)) for row, t in zip(rows, tensors, strict=True)]


def _like(copied: Tensor, tensor: Tensor) -> Tensor:
    # Code may ask whether an input is a parameter.
    if type(tensor) is nn.Parameter:
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _span(tensor: Tensor) -> tuple[tuple[int, str], int, int]:
    """Return the storage and dtype of a tensor, and its start and end in the storage, in elements."""
    last = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    start = int(tensor.storage_offset())
    return (tensor.untyped_storage()._cdata, str(tensor.dtype)), start, start + last + 1


def fills_stretch(tensor: Tensor) -> bool:
    """Return whether a tensor fills the stretch of memory from its first element to its last."""
    _, start, end = _span(tensor)
    return end - start == tensor.numel()

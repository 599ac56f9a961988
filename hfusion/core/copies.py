"""Copies of a module's arguments, so that running user code does not change the originals.

Use `copies` for runs that write to arguments, `aliases` and `contiguous_aliases` for tracers, which write no values but
set attributes, and `copies_in_like_memory` for code whose result may depend on which tensors share memory.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.core.memory import is_plain
from hfusion.core.parameter_attributes import keep_marks
from hfusion.core.python_values import SCALARS

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

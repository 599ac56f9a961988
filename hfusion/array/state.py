"""What a fused module knows of its members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hfusion.capture.compare import Comparison
from hfusion.capture.contents import same_marks
from hfusion.capture.skeleton import skeleton
from hfusion.compiler.compiler import Compiler
from hfusion.core.copies import module_copy
from hfusion.core.errors import FusionError
from hfusion.core.marks import mark_stack
from hfusion.core.membership import Membership, mark


@dataclass(frozen=True)
class Array:
    """What a fused module knows of its members.

    ``skeletons[v]`` is a model of variant v without tensors; ``origins`` remembers whose parameters were fused.
    """

    members: int
    skeletons: tuple[nn.Module, ...]
    comparison: Comparison
    verify: bool
    tune: bool = False
    origins: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "origins": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        skeletons = tuple(module_copy(skeleton, memo) for skeleton in self.skeletons)
        return replace(self, skeletons=skeletons, origins=WeakIdKeyDictionary())

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, origins=WeakIdKeyDictionary())


@dataclass(frozen=True, eq=False)
class ArrayState:
    """The members with such Python attributes as a train or eval of their own has left, and the programs for them."""

    number: int
    array: Array
    compiler: Compiler


def renewed(array: Array, found: Sequence[Any], views: Sequence[nn.Module]) -> Array:
    """``array`` of members that have changed; ``found[b]`` is what forward can read of member b besides tensors."""
    prints: dict[Any, int] = {}
    variants = tuple(prints.setdefault(content, len(prints)) for content in found)
    skeletons = tuple(skeleton(variants.index(v), views[variants.index(v)]) for v in range(len(prints)))
    return replace(array, skeletons=skeletons, comparison=replace(array.comparison, variants=variants))


def mark_tensors(array: Array, named: Mapping[str, Tensor]) -> None:
    """Mark the array's tensors as its own, and give parameters what users have set on those of the members."""
    padded: frozenset[str] = getattr(array.skeletons[0], "padded", frozenset())
    for name, tensor in named.items():
        mark(tensor, Membership(name, array.members, name not in array.comparison.shared, name in padded))
    same = same_marks(array.skeletons)
    variants = [dict(skeleton.named_parameters()) for skeleton in array.skeletons]
    for name in variants[0]:
        mark_stack(named[name], name, [parameters[name] for parameters in variants], same)


def row_copy(tensor: Tensor, index: int | None) -> Tensor:
    row = (tensor.detach() if index is None else tensor.detach()[index]).clone()
    return nn.Parameter(row, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else row


def empty_stack(tensor: Tensor, members: int) -> Tensor:
    """Room ``[B, *shape]`` for tensors like ``tensor``, contiguous; a parameter if it is one."""
    stack = torch.empty(members, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(stack, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else stack


def partly_written(name: str) -> FusionError:
    """Of a program that writes to a buffer that only some members share, or another tensor."""
    return FusionError(
        f"forward writes into the buffer {name}, which some models share but not all, or which lies in the memory of "
        "another tensor of the model; give each its own, by copy.deepcopy or clone()"
    )

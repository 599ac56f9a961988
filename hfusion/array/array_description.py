"""Description of an array: the structure of its members, and how their tensors are stacked."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from hfusion.capture.attribute_fingerprint import same_marks
from hfusion.capture.compare_models import Comparison
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.compiler import Compiler
from hfusion.core.copies import module_copy
from hfusion.core.errors import FusionError
from hfusion.core.membership import TAKE_BEFORE, Membership, check_whole_stack, mark
from hfusion.core.parameter_attributes import mark_stack


@dataclass(frozen=True)
class Array:
    """Description of the members of a fused module.

    ``skeletons[v]`` is a model of variant v without tensors; ``origins`` maps original parameters to member and key.
    """

    members: int
    skeletons: tuple[nn.Module, ...]
    comparison: Comparison
    verify: bool
    origins: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each tensor of a member, by key."""
        return {name: tensor.shape for name, tensor in tensors(self.skeletons[0])}

    def check_stacks(self, stacks: Mapping[str, Tensor]) -> None:
        """Raise FusionError if a stack was given a row shape that is not its members', for example by ``.data``."""
        for name, stack in stacks.items():
            is_stacked = name in self.shapes and name not in self.comparison.shared
            if is_stacked and not is_lazy(stack) and stack.shape[1:] != self.shapes[name]:
                raise FusionError(
                    f"The stack of {name} has the shape {tuple(stack.shape)}, but members have "
                    f"{tuple(self.shapes[name])} "
                    "each: it was given other memory, for example by .data. Unfuse the array, resize the members, and "
                    "fuse them again."
                )

    def __getstate__(self) -> dict[str, Any]:
        for model in self.skeletons:
            _check_pickle(model)
        return {**{key: value for key, value in vars(self).items() if key != "shapes"}, "origins": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        skeletons = tuple(module_copy(skeleton, memo) for skeleton in self.skeletons)
        return replace(self, skeletons=skeletons, origins=WeakIdKeyDictionary())

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, origins=WeakIdKeyDictionary())


_PICKLING = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")


def _check_pickle(model: nn.Module) -> None:
    """Raise FusionError if the classes of a skeleton pickle themselves by values, which its tensors do not have."""
    parts = model.modules()
    own = {type(p) for p in parts if any(getattr(type(p), n) is not getattr(nn.Module, n) for n in _PICKLING)}
    if not own:
        return
    try:
        pickled = pickle.dumps(model)
    except Exception:
        # The pickler in use may know more, as cloudpickle does of local classes. If not, it raises the same error.
        return
    try:
        pickle.loads(pickled)
    except Exception as error:
        names = ", ".join(sorted(cls.__name__ for cls in own))
        raise FusionError(
            f"This array cannot be pickled: the pickling of {names} reads values of tensors, which the array keeps in "
            "stacks. Pickle the modules of unfuse(), or use hf.save."
        ) from error


@dataclass(frozen=True, eq=False)
class ArrayState:
    """A state of the members (their variants and Python attributes), with the programs compiled for it."""

    number: int
    array: Array
    compiler: Compiler


def mark_tensors(array: Array, named: Mapping[str, Tensor]) -> None:
    """Mark the array's tensors as its own, and copy classes and attributes of members' parameters to the stacks."""
    padded: frozenset[str] = getattr(array.skeletons[0], "padded", frozenset())
    for name, tensor in named.items():
        mark(tensor, Membership(name, array.members, name not in array.comparison.shared, name in padded))
    common = same_marks(array.skeletons)
    variants = [dict(tensors(skeleton)) for skeleton in array.skeletons]
    for name in variants[0]:
        mark_stack(named[name], name, [held[name] for held in variants], common)


def row_copy(tensor: Tensor, index: int | None) -> Tensor:
    if index is not None:
        check_whole_stack(tensor, TAKE_BEFORE)
    row = tensor.detach() if index is None else tensor.detach()[index]
    row = row.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(row, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else row


def member_rows(
    array: Array, index: int, stacks: Mapping[str, Tensor], shared: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return copies of the tensors of member ``index``, by key; tensors in ``shared`` are not copied."""
    array.check_stacks(stacks)
    return {name: shared[name] if name in shared else row_copy(stacks[name], index) for name in array.shapes}


def empty_stack(tensor: Tensor, members: int) -> Tensor:
    """Return a contiguous stack ``[members, *shape]`` for tensors like ``tensor``; a parameter if ``tensor`` is one."""
    stack = torch.empty(members, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(stack, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else stack


def stack_of(rows: Sequence[Tensor]) -> Tensor:
    """Return a contiguous stack of ``rows``; a parameter if they are parameters."""
    stack = empty_stack(rows[0], len(rows))
    for target, row in zip(stack.detach(), rows, strict=True):
        target.copy_(row.detach())
    return stack

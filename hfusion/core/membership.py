"""Marks on tensors that belong to an array of models.

A parameter or buffer of a fused module is either the stack of the members' tensors, ``[B, *shape]``, or one tensor
that all members share. The mark travels with the tensor, so that optimizers and clipping need only the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from hfusion.core.errors import FusionError
from hfusion.core.row_indices import leading

_MARK = "_hfusion_membership"
_OWN_HOOK = "_hfusion_own_hook"
_ADDED = "_hfusion_added"

T = TypeVar("T", bound=torch.Tensor)


@dataclass(frozen=True)
class Membership:
    """The mark of a fused module's tensor: ``name`` is its key in the state dict, ``members`` is B.

    ``stacked``: the first dimension is the member; otherwise the tensor is one object for all members. ``padded``:
    members' tensors may be smaller than a row, padded with zeros. ``standalone``: the tensor is of a single model
    outside of arrays; ``members`` is 1, and there is no dimension for it. ``shapes``: shapes of the members' tensors if
    they differ, None for a member that has no such tensor; empty if all fill their rows.
    """

    name: str
    members: int
    stacked: bool
    padded: bool = False
    standalone: bool = False
    shapes: tuple[torch.Size | None, ...] = ()

    @property
    def is_own(self) -> bool:
        """True if the tensor holds separate values for each member."""
        return self.stacked or self.standalone

    def exists_in(self, member: int) -> bool:
        """Return whether member ``member`` has such a tensor."""
        return not self.shapes or self.shapes[member] is not None

    @property
    def is_unused(self) -> bool:
        """True if no member has such a tensor any more: those who had it have left the array."""
        return bool(self.shapes) and all(shape is None for shape in self.shapes)


def member_rows(tensor: torch.Tensor, mark: Membership) -> torch.Tensor:
    """Return a tensor, or its state or gradient, as ``[B, *shape]``; B is 1 if one model or all members own it."""
    return tensor if mark.stacked else tensor.unsqueeze(0)


def own_row(tensor: torch.Tensor, mark: Membership, member: int) -> torch.Tensor | None:
    """Return the part of a stack, or of its gradient or state, that a member fills, a view; None if it has none.

    A state whose rows are not of the stack's shape, such as a count, is returned as a whole row.
    """
    row = member_rows(tensor, mark)[member]
    if not mark.shapes:
        return row
    shape = mark.shapes[member]
    if shape is None:
        return None
    return leading(row, shape) if row.dim() == len(shape) else row


arrays: WeakSet[torch.nn.Module] = WeakSet()
"""The fused modules of this process."""


def mark(tensor: T, membership: Membership) -> T:
    """Attach ``membership`` to ``tensor`` and return the tensor."""
    setattr(tensor, _MARK, membership)
    return tensor


def membership(tensor: torch.Tensor) -> Membership | None:
    """The mark of a fused module's tensor; None for any other tensor."""
    value = getattr(tensor, _MARK, None)
    return value if isinstance(value, Membership) else None


def has_rows(tensor: torch.Tensor) -> bool:
    """Return whether the first dimension of a tensor is the member."""
    mark = membership(tensor)
    return mark is not None and mark.stacked


# A remedy to pass to `check_whole_stack`.
TAKE_BEFORE = "take members, fused[i] and fused.unfuse(), before fully_shard"


def check_whole_stack(tensor: torch.Tensor, remedy: str) -> None:
    """Raise a FusionError for a stack of which a rank holds a piece only, as `fully_shard` leaves it (a DTensor)."""
    if hasattr(tensor, "placements"):
        mark = membership(tensor)
        label = f"a tensor of shape {list(tensor.shape)}" if mark is None else repr(mark.name)
        raise FusionError(
            f"{label} is a {type(tensor.detach()).__name__}, of which each rank holds a piece: {remedy}; or give each "
            "rank members of its own, hf.fuse(models[hf.rows(len(models))]), and do not shard what they train"
        )


def is_per_member(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds separate values for each member, or belongs to a model outside of arrays."""
    mark = membership(tensor)
    return mark is not None and mark.is_own


_latest_addition = 0


def note_added(stacks: Iterable[torch.Tensor]) -> None:
    """Note that ``stacks`` have just been added to an array, with members that brought such tensors."""
    global _latest_addition
    for stack in stacks:
        _latest_addition += 1
        setattr(stack, _ADDED, _latest_addition)


def latest_addition() -> int:
    """Return the number of the stack that was last added to any array of this process; 0 if none was."""
    return _latest_addition


def added_after(stack: torch.Tensor, number: int) -> bool:
    """Return whether ``stack`` was added to its array after addition ``number``."""
    added: int = getattr(stack, _ADDED, 0)
    return added > number


def own_hook(hook: Any) -> Any:
    """Mark a hook as registered by an array on its members, not by the user, and return it."""
    setattr(hook, _OWN_HOOK, True)
    return hook


def is_own_hook(hook: object) -> bool:
    """Return whether a hook was marked by `own_hook`."""
    return hasattr(hook, _OWN_HOOK)

"""Marks on tensors that belong to an array of models.

A parameter or buffer of a fused module is either the stack of the members' tensors, ``[B, *shape]``, or one tensor
that all members share. The mark travels with the tensor, so that optimizers and clipping need only the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hfusion.core.errors import FusionError

_MARK = "_hfusion_membership"
_OWN_HOOK = "_hfusion_own_hook"

T = TypeVar("T", bound=torch.Tensor)


@dataclass(frozen=True)
class Membership:
    """The mark of a fused module's tensor: ``name`` is its key in the state dict, ``members`` is B.

    ``stacked``: the first dimension is the member; otherwise the tensor is one object for all members. ``padded``:
    members' tensors may be smaller than a row, padded with zeros. ``standalone``: the tensor is of a single model
    outside of arrays; ``members`` is 1, and there is no dimension for it.
    """

    name: str
    members: int
    stacked: bool
    padded: bool = False
    standalone: bool = False

    @property
    def is_own(self) -> bool:
        """True if the tensor holds separate values for each member."""
        return self.stacked or self.standalone


def member_rows(tensor: torch.Tensor, mark: Membership) -> torch.Tensor:
    """Return a tensor, or its state or gradient, as ``[B, *shape]``; B is 1 if one model or all members own it."""
    return tensor if mark.stacked else tensor.unsqueeze(0)


def mark(tensor: T, membership: Membership) -> T:
    """Attach ``membership`` to ``tensor`` and return the tensor."""
    setattr(tensor, _MARK, membership)
    return tensor


def unmark(tensor: torch.Tensor) -> None:
    """Remove the mark of a tensor, if it has one."""
    vars(tensor).pop(_MARK, None)


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
            f"{label} is of class {type(tensor.detach()).__name__}, of which each rank holds a piece: {remedy}; or "
            "give each rank members of its own, hf.fuse(models[hf.rows(len(models))]), and do not shard what they train"
        )


def is_per_member(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds separate values for each member, or belongs to a model outside of arrays."""
    mark = membership(tensor)
    return mark is not None and mark.is_own


def own_hook(hook: Any) -> Any:
    """Mark a hook as registered by an array on its members, not by the user, and return it."""
    setattr(hook, _OWN_HOOK, True)
    return hook


def is_own_hook(hook: object) -> bool:
    """Return whether a hook was marked by `own_hook`."""
    return hasattr(hook, _OWN_HOOK)

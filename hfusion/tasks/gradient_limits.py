"""Limits on the gradients of an array, separate for each member."""

from __future__ import annotations

from torch import Tensor

from hfusion.core.errors import PlanError
from hfusion.core.membership import membership
from hfusion.optim.hyper import member_vector
from hfusion.tasks.arrange import Arrangement


def clip_limits(one: Arrangement) -> Tensor | None:
    """The largest norms ``[width]`` of the members of an array, None where it is not clipped.

    Raises:
        PlanError: limits out of range, or a trained tensor that is no member's own.
    """
    if one.task.clip_norm is None:
        return None
    for param in one.array.parameters():
        found = membership(param)
        if param.requires_grad and found is not None and not found.stacked and found.members > 1:
            raise PlanError(
                f"task {one.task.name!r} is clipped per member, but {found.name!r} is one trained tensor for all "
                "members, whose gradient is no member's own: freeze it, or give each member its own"
            )
    limits = member_vector("clip_norm", one.task.clip_norm, one.task.members).as_subclass(Tensor)
    if not bool((limits >= 0).all()):
        raise PlanError(f"task {one.task.name!r}: clip_norm is {limits.tolist()}: every value must be at least 0")
    return limits[list(one.members)]

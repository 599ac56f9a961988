"""Limits on the gradients of an array, separate for each member."""

from __future__ import annotations

from torch import Tensor

from hfusion.core.errors import PlanError
from hfusion.core.membership import membership
from hfusion.optim.hyper import member_vector
from hfusion.tasks.arrange import Arrangement


def clip_limits(arrangement: Arrangement) -> Tensor | None:
    """The largest norms ``[width]`` of the members of an array, None where it is not clipped.

    Raises:
        PlanError: limits out of range, or a trained tensor that is no member's own.
    """
    if arrangement.task.clip_norm is None:
        return None
    for param in arrangement.array.parameters():
        mark = membership(param)
        if param.requires_grad and mark is not None and not mark.stacked and mark.members > 1:
            raise PlanError(
                f"task {arrangement.task.name!r} is clipped per member, but {mark.name!r} is one trained tensor for "
                "all members, whose gradient is no member's own: freeze it, or give each member its own"
            )
    limits = member_vector("clip_norm", arrangement.task.clip_norm, arrangement.task.members).as_subclass(Tensor)
    if not bool((limits >= 0).all()):
        raise PlanError(
            f"task {arrangement.task.name!r}: clip_norm is {limits.tolist()}: every value must be at least 0"
        )
    return limits[list(arrangement.members)]

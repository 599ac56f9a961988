"""Guards between gradients and update: members that are not finite, and clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hfusion.array.module import FusedModule
from hfusion.core.errors import FusionError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import is_per_member
from hfusion.optim import clip_grad_norm_, clip_grad_value_
from hfusion.optim.hyper import HyperValue, member_vector, plain
from hfusion.optim.native_kernels import FiniteCheck
from hfusion.optim.scaler import overflowing

OnNonfinite = Literal["freeze", "raise", "ignore"]

# Number of elements up to which one thread checks as fast as several.
_ONE_THREAD = 1 << 20


LIMITS = ("clip_norm", "clip_value")
"""The columns of bounds of the members' gradients, float64 ``[rows]``: of their norm, and of their magnitude."""


def check_limits(rows: int, **given: HyperValue | None) -> dict[str, Tensor]:
    """Return the limits that are given, by name. Raises ValueError for a wrong number of values, or a value below 0."""
    limits = {}
    for name, value in given.items():
        if value is not None:
            limits[name] = values = plain(member_vector(name, value, rows))
            if not bool((values >= 0).all()):
                raise ValueError(f"{name}={values.tolist()}: every limit must be at least 0")
    return limits


def common_value(values: Tensor) -> Any:
    """Return the value that all rows have; None if they differ."""
    return values[0].item() if bool((values == values[0]).all()) else None


def limits_of_new(initial: Mapping[str, float | None], rows: int, **given: HyperValue | None) -> dict[str, Tensor]:
    """Return the limits of members that start; one that is not given is what all members began with.

    ``initial``: the limits that all members began with, by name; None where they differed.

    Raises ValueError for None if members began with different limits, or for a limit that the population lacks.
    """
    for name, value in given.items():
        if name not in initial and value is not None:
            raise ValueError(f"{name}={value}: this population has no {name}; give it one when it is made")
        if name in initial and value is None and initial[name] is None:
            raise ValueError(
                f"{name} differs between the members: say what it is for those that join, {name}=...; "
                'float("inf") clips nothing'
            )
    return check_limits(rows, **{name: initial[name] if given[name] is None else given[name] for name in initial})


def clip(fused: FusedModule, table: MemberTable) -> None:
    """Clip gradients, first by value, then by norm; those of parameters that all members share are not clipped."""
    if not any(name in table for name in LIMITS):
        return
    params = [p for p in fused.parameters() if p.grad is not None and is_per_member(p)]
    if params and "clip_value" in table:
        clip_grad_value_(params, table["clip_value"])
    if params and "clip_norm" in table:
        clip_grad_norm_(params, table["clip_norm"])


def bad_rows(fused: FusedModule, losses: Tensor, check: FiniteCheck) -> Tensor:
    """Return the members whose loss or gradients are not all finite: bool ``[rows]``, on the CPU."""
    grads = [param.grad for param in fused.parameters() if param.grad is not None and is_per_member(param)]
    if all_finite(grads, losses.detach(), check):
        return torch.zeros(len(fused), dtype=torch.bool, device="cpu")
    bad: Tensor = ~losses.detach().isfinite().cpu()
    return bad | overflowing([grad.reshape(len(fused), -1) for grad in grads], len(fused))


def gradients_finite(fused: FusedModule, losses: Tensor, check: FiniteCheck) -> bool:
    """Return whether losses and all gradients are finite, as `all_finite`."""
    return all_finite([grad for param in fused.parameters() if (grad := param.grad) is not None], losses, check)


def all_finite(grads: Sequence[Tensor], losses: Tensor, check: FiniteCheck) -> bool:
    """Return whether all values are finite. Also False if one call cannot tell, for tensors of different dtypes,
    devices or layouts, or if squares overflow.
    """
    checked_tensors = [*grads, losses]
    # Several threads check more elements than this faster.
    if sum(map(Tensor.numel, grads)) < _ONE_THREAD and (answer := check(checked_tensors)) is not None:
        return answer
    if len({(tensor.dtype, tensor.device, tensor.layout) for tensor in checked_tensors}) > 1:
        return False
    if losses.layout is not torch.strided or not all(tensor.numel() for tensor in checked_tensors):
        return False
    # Computing the largest magnitude would take five times as long.
    return math.isfinite(float(torch.stack(torch._foreach_norm(checked_tensors, 2)).sum()))


def check_common(fused: FusedModule) -> None:
    """Raise a FusionError where a gradient that all members share is not finite."""
    for name, param in fused.named_parameters():
        if param.grad is not None and not is_per_member(param) and not bool(param.grad.isfinite().all()):
            raise FusionError(
                f"the gradient of {name}, which all members train together, is not finite: one member that diverges "
                "spoils it for all, so that none can go on as if healthy; freeze it, or give each member its own"
            )

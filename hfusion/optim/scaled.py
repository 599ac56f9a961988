"""A step under torch.amp.GradScaler, member by member: only members whose gradients overflow skip the step.

Source: https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfusion.core.errors import FusionError
from hfusion.optim.group import membership_of
from hfusion.optim.skipped_members import SkippedRows, of_members, together


@torch.no_grad()
def divide(params: Sequence[Tensor], scale: Tensor) -> None:
    """Divide the gradients in place as ``GradScaler.unscale_`` does."""
    inverse = scale.double().reciprocal().float()
    for param in params:
        assert param.grad is not None
        param.grad.mul_(inverse.to(param.grad.device))


@torch.no_grad()
def overflown(params: Sequence[Tensor], members: int) -> SkippedRows:
    """Return what must not step: members with a non-finite gradient, in all parameters, and shared parameters with one.

    Raises FusionError if all gradients are finite.
    """
    bad = torch.zeros(members, dtype=torch.bool, device="cpu")
    shared_overflows: SkippedRows = {}
    for param in params:
        assert param.grad is not None
        finite = param.grad.isfinite()
        if membership_of(param).stacked:
            bad |= ~finite.reshape(members, -1).all(1).cpu()
        elif not finite.all():
            shared_overflows[param] = torch.ones((), dtype=torch.bool, device="cpu")
    if not bad.any() and not shared_overflows:
        raise FusionError(
            "the GradScaler found gradients that are not finite, and there are none left: they were changed between "
            "scaler.unscale_ and scaler.step (clip_grad_value_, nan_to_num_), so that the members they belong to are "
            "unknown; clip with hf.optim.clip_grad_norm_, or change the gradients before scaler.unscale_"
        )
    return together(shared_overflows, of_members(params, bad))

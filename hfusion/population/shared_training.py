"""A step of members who train a parameter together: its gradient is the sum over those that are there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfusion.step.train_step import call_arguments, check_losses

if TYPE_CHECKING:
    from hfusion.population.population import ArrayGroup


def step_together(pop: ArrayGroup, inputs: Any, target: Any, keywords: dict[str, Any]) -> Tensor:
    """Make a step eagerly, with the losses of members that are in no free or frozen row; losses ``[rows]``."""
    updates = pop._updates
    if not updates.underway:
        pop.optimizer.zero_grad()
        pop.fused.zero_grad()
    args, kwargs = call_arguments(inputs, keywords)
    with torch.enable_grad():
        losses = pop._loss(pop.fused(*args, **kwargs), target)
        check_losses(losses, len(pop.fused))
        values: Tensor = losses.detach()
        scaled = losses if pop.scaler is None else pop.scaler.scale(losses)
        rows = [row for row in pop._roll.live if row not in pop.frozen]
        if not rows:
            return values
        with torch.autocast(losses.device.type, enabled=False):
            (scaled[rows].sum() / int(updates.calls[0])).backward()
    updates.spoilt |= ~values.isfinite().cpu()
    due = updates.count(pop._roll.alive)
    if bool((due & pop._roll.alive).any()):
        pop._update(values, due)
    return values

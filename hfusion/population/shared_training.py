"""A step of members that train a parameter together: its gradient is the sum over the members that train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import call_arguments
from hfusion.core.member_random import keyed
from hfusion.step.eager_step import backward

if TYPE_CHECKING:
    from hfusion.population.population import ArrayGroup


def step_together(pop: ArrayGroup, inputs: Any, target: Any, keywords: dict[str, Any]) -> Tensor:
    """Make an eager step with the losses of rows that are neither free nor frozen. Return losses ``[rows]``."""
    updates = pop._updates
    if not updates.underway:
        pop.optimizer.zero_grad()
        pop.fused.zero_grad()
    args, kwargs = call_arguments(inputs, keywords)
    training = set(pop._roll.live).difference(pop.frozen)
    scales = torch.ones(len(pop.fused), dtype=torch.float64, device="cpu")
    scales = (scales if pop.scaler is None else pop.scaler.scale(scales)) / int(updates.calls[0])

    def of_block(losses: Tensor, rows: range) -> None:
        chosen = [row - rows.start for row in rows if row in training]
        if chosen:
            block_scales = scales[rows.start : rows.stop].to(losses)
            backward((losses * block_scales)[chosen])

    budget = pop._step.budget
    block = None if budget is None else budget.plan(Arguments.of(args, kwargs)).eager.block
    with keyed(pop._step.keys):
        values, _ = pop._together.run(args, kwargs, target, block, budget is not None, of_block)
    if not training:
        return values
    updates.spoilt |= ~values.isfinite().cpu()
    due = updates.count(pop._roll.alive)
    if bool((due & pop._roll.alive).any()):
        pop._update(values, due)
    return values

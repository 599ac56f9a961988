"""Assertions of forward and loss in a compiled step. If one fails, the step is undone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hfusion.step.step_graph import StepCall
from hfusion.step.step_signatures import StepVariant


def checked_step(variant: StepVariant, call: StepCall, buffers: Iterable[Tensor]) -> Tensor | None:
    """Run the compiled step of ``variant``, which writes gradients and buffers, and return its losses ``[B]``.

    If an assertion fails for some member, restore ``buffers`` and return None; an eager step then raises the error.
    """
    assert variant.program is not None
    assert variant.sources is not None
    failed = variant.sources[0].failed.get("members")
    if failed is None:
        return variant.program.step(call)
    before = [(buffer.detach(), buffer.detach().clone()) for buffer in buffers]
    losses = variant.program.step(call)
    if not failed.any():
        return losses
    for buffer, value in (*before, (failed, torch.zeros_like(failed))):
        buffer.copy_(value)
    return None

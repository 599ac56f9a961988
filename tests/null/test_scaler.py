"""Scaled steps on CUDA: the host waits once, to learn which members have overflowed."""

from __future__ import annotations

import pytest
import torch

import hfusion as hf
from tests.null.arrays import MEMBERS, TENSORS, optimizer, parameters
from tests.null.calls import Calls, calls_per_step

pytestmark = pytest.mark.null


def calls_of_a_scaled_step(max_norm: float | None) -> Calls:
    """Return the calls of a step of AdamW with a loss scale, whose gradients are clipped to ``max_norm``."""
    stacks = parameters()
    opt, scaler = optimizer("AdamW", stacks), hf.optim.GradScaler()
    losses = torch.zeros(MEMBERS, device="cuda", requires_grad=True)

    def step() -> None:
        scaler.scale(losses)
        if max_norm is not None:
            scaler.unscale_(opt)
            hf.optim.clip_grad_norm_(stacks, max_norm)
        scaler.step(opt)
        scaler.update()

    return calls_per_step(step)


def test_a_scaled_step_waits_once() -> None:
    # A largest magnitude and a product for each tensor, and what joins the flags of all, which the host then reads.
    assert calls_of_a_scaled_step(None) == Calls(launches=2 * TENSORS + 11, graphs=1, waits=1, pageable=1)


def test_a_scaled_and_clipped_step_waits_once() -> None:
    calls = calls_of_a_scaled_step(1.0)
    assert (calls.graphs, calls.waits, calls.refused) == (1, 1, ())


def test_losses_are_scaled_without_a_wait() -> None:
    scaler = hf.optim.GradScaler()
    losses = torch.zeros(MEMBERS, device="cuda", requires_grad=True)
    assert calls_per_step(lambda: scaler.scale(losses)).waits == 0

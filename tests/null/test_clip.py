"""Clipping on CUDA makes the host wait for nothing."""

from __future__ import annotations

import pytest

import hfusion as hf
from tests.null.arrays import MEMBERS, TENSORS, parameters
from tests.null.calls import calls_per_step

pytestmark = pytest.mark.null


@pytest.mark.parametrize("limit", [1.0, [1.0 + member for member in range(MEMBERS)]], ids=["one", "per member"])
def test_norms(limit: float | list[float]) -> None:
    stacks = parameters()
    calls = calls_per_step(lambda: hf.optim.clip_grad_norm_(stacks, limit))
    assert (calls.waits, calls.refused) == (0, ())
    # A norm and a product for each tensor, and what makes factors of them.
    assert calls.launches <= 2 * TENSORS + 8


def test_values() -> None:
    stacks = parameters()
    calls = calls_per_step(lambda: hf.optim.clip_grad_value_(stacks, 1.0))
    assert (calls.waits, calls.refused) == (0, ())

"""Clipping on CUDA takes as many launches for many tensors as for few, and the host waits for nothing."""

from __future__ import annotations

import pytest
import torch

import hfusion as hf
from tests.null.arrays import MEMBERS, parameters
from tests.null.calls import Calls, calls_per_step

pytestmark = pytest.mark.null

LAUNCHES = 10
"""Copies of addresses and of limits; three kernels over all tensors; a norm over tensors, and four for factors."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("limit", [1.0, [1.0 + member for member in range(MEMBERS)]], ids=["one", "per member"])
def test_norms(limit: float | list[float], norm_type: float, dtype: torch.dtype) -> None:
    stacks = parameters(dtype)
    # The factors of half precision have float32 in between.
    launches = LAUNCHES + (dtype is not torch.float32)
    for some in (stacks, stacks[:3]):
        calls = calls_per_step(lambda some=some: hf.optim.clip_grad_norm_(some, limit, norm_type))  # type: ignore[misc]
        assert calls == Calls(launches=launches, graphs=0, waits=0)


def test_values() -> None:
    stacks = parameters()
    calls = calls_per_step(lambda: hf.optim.clip_grad_value_(stacks, 1.0))
    assert (calls.waits, calls.refused) == (0, ())

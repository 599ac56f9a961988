"""Code that runs in the sandbox leaves no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hfusion.compiler.sandbox import without_trace


def drawing_and_failing() -> None:
    with without_trace():
        torch.rand(3), random.random(), np.random.rand(2)
        torch.set_default_dtype(torch.float64)
        raise ZeroDivisionError


def test_random_states_and_the_default_dtype_are_as_before_also_after_an_error() -> None:
    def state() -> tuple[object, ...]:
        numpy = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
        return torch.get_rng_state().tolist(), random.getstate(), numpy, torch.get_default_dtype()

    before = state()
    with pytest.raises(ZeroDivisionError):
        drawing_and_failing()
    assert state() == before


def test_an_outer_checkpoint_sees_nothing_of_it() -> None:
    outputs = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not outputs:
            with without_trace():
                outputs.append(x.sin().exp())
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert x.grad is not None

"""Assertions in code that pytest does not rewrite, as it does those of tests."""

from __future__ import annotations

import torch
from torch import Tensor


def all_finite(x: Tensor) -> None:
    assert torch.isfinite(x).all(), "not finite"


def none_negative(x: Tensor) -> None:
    assert not (x < 0).any(), "a negative target"

"""Assertions in code that pytest does not rewrite, as it does those of tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def asserts(value: Any) -> None:
    assert value


def asserts_not(value: Any) -> None:
    assert not value


def asserts_with_text(value: Any) -> None:
    assert value, f"not {value}"


def all_finite(x: Tensor) -> None:
    assert torch.isfinite(x).all(), "not finite"


def none_negative(x: Tensor) -> None:
    assert not (x < 0).any(), "a negative target"


def asserts_by_bool(value: Any) -> None:
    assert bool(value)

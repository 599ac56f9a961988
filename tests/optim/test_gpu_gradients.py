"""Clipping by the Triton kernels equals torch's of each member: on a CUDA device, or without one in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest
import torch
from torch import Tensor

from hfusion import optim
from hfusion.optim import clip
from tests.optim.arrays import Array
from tests.optim.interpreted import forget, interpret

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MANY = 1024 + 5
SHAPES = ((4, 3), (), (5,), (0,), (MANY,), (16, 8))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of half precision one rounding to the next number: the order of a sum in float32 may decide which is nearer."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Gradients that the kernels clip."""
    pytest.importorskip("triton")
    monkeypatch.delenv("HFUSION_NATIVE", raising=False)
    if DEVICE == "cpu":
        interpret(monkeypatch)
    created: list[object] = []
    original = clip.StackedGradients.__init__

    def counted(self: object, *args: object) -> None:
        created.append(self)
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(clip.StackedGradients, "__init__", counted)
    yield created
    if DEVICE == "cpu":
        forget()


def clip_alone(array: Array, limits: list[float], norm_type: float) -> Tensor:
    """Clip each member as torch does, and return the norms."""
    return torch.stack(
        [
            torch.nn.utils.clip_grad_norm_([p for p in params if p.numel()], limit, norm_type)
            for params, limit in zip(array.members, limits, strict=True)
        ]
    )


def assert_equal(array: Array, norms: Tensor, alone: Tensor) -> None:
    """Compare norms and gradients."""
    tolerance = max(TOLERANCE.get(p.grad.dtype, 1e-12) for p in array.params if p.grad is not None)
    assert norms.dtype is alone.dtype
    torch.testing.assert_close(norms, alone, rtol=tolerance, atol=0.0, equal_nan=True)
    for index, param in enumerate(array.params):
        if param.grad is not None:
            rows = torch.stack([params[index].grad for params in array.members])  # type: ignore[misc]
            torch.testing.assert_close(param.grad, rows, rtol=3 * tolerance, atol=0.0, equal_nan=True)


@pytest.mark.parametrize(("members", "dtype"), [*((3, dtype) for dtype in TOLERANCE), (1, torch.float32)], ids=str)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, inf])
def test_equals_alone(members: int, norm_type: float, dtype: torch.dtype, kernels: list[object]) -> None:
    array = Array(members, SHAPES, dtype, DEVICE)
    for limits in ([0.5, 15.0, 450.0][:members], [0.0, inf, 1e-3][:members]):
        array.draw_grads(skip=[2])
        norms = optim.clip_grad_norm_(array.params, limits, norm_type)
        assert_equal(array, norms, clip_alone(array, limits, norm_type))
    assert len(kernels) == 2

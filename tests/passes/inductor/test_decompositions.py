"""Operators written as several give what the one gives, also into buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hfusion.passes.inductor.decompositions import DECOMPOSITIONS

aten = torch.ops.aten


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.baddbmm(bias, a, b)


def flat_product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(bias, a, b)


def scaled_product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.baddbmm(bias, a, b, beta=0.5, alpha=2)


def norm(affine: bool, training: bool) -> Callable[..., tuple[Tensor, ...]]:
    def compute(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        mean, var = mean.clone(), var.clone()
        affine_parameters = (weight, bias) if affine else (None, None)
        results = aten._native_batch_norm_legit.default(x, *affine_parameters, mean, var, training, 0.3, 1e-3)
        return (*results, mean, var)

    return compute


def batches(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    channels = shape[1]
    return (normal(*shape, dtype=dtype), *(normal(channels, dtype=dtype).abs() + k for k in range(4)))


def in_float32(*shape: int) -> tuple[Tensor, ...]:
    return batches(*shape, dtype=torch.float32)[1:]


MATRICES = (normal(3, 1, 5), normal(3, 4, 2), normal(3, 2, 5))
CASES: list[tuple[str, Callable[..., Any], tuple[Tensor, ...], bool]] = [
    ("product", product, MATRICES, True),
    ("flat product", flat_product, (normal(2), normal(4, 3), normal(3, 2)), True),
    ("scaled product", scaled_product, MATRICES, False),
    ("product in bfloat16", product, tuple(m.bfloat16() for m in MATRICES), False),
    ("norm of 2 dims", norm(True, True), batches(6, 3), True),
    ("norm of 3 dims", norm(True, True), batches(6, 3, 5), True),
    ("norm of 4 dims", norm(True, True), batches(2, 3, 4, 5), True),
    ("norm without weights", norm(False, True), batches(4, 3, 5), True),
    ("norm in eval", norm(True, False), batches(4, 3, 5), False),
    ("norm in bfloat16", norm(True, True), batches(4, 3, 5, dtype=torch.bfloat16), False),
    ("norm of bfloat16", norm(True, True), (normal(4, 3, 5, dtype=torch.bfloat16), *in_float32(4, 3, 5)), True),
    ("norm of bfloat16 alone", norm(False, True), (normal(4, 3, 5, dtype=torch.bfloat16), *in_float32(4, 3, 5)), True),
]


@pytest.mark.parametrize(("name", "fn", "tensors", "written"), CASES, ids=[name for name, *_ in CASES])
def test_the_same_values(name: str, fn: Callable[..., Any], tensors: tuple[Tensor, ...], written: bool) -> None:
    module = make_fx(fn, decomposition_table=DECOMPOSITIONS)(*tensors)
    assert any(node.target in DECOMPOSITIONS for node in module.graph.nodes) is not written
    # Values of bfloat16 may round to either side.
    limit = 2**-8 if tensors[0].dtype is torch.bfloat16 else 1e-12
    torch.testing.assert_close(module(*tensors), fn(*tensors), rtol=limit, atol=limit)

"""Scatters into zeros become comparisons, where they choose one place per row and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hfusion.passes.inductor.onehot import chosen, onehot

aten = torch.ops.aten


def gradient_of_max(dim: int) -> Callable[[Tensor], Tensor]:
    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        values = leaf.max(dim).values
        return torch.autograd.grad(values.sin().sum(), leaf)[0]

    return gradient


def two_per_row(x: Tensor) -> Tensor:
    index = torch.arange(2).expand(x.shape[0], x.shape[1], 2)
    return torch.zeros_like(x).scatter(2, index, x[..., :2])


def fewer_rows(x: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter(2, torch.ones_like(x[:1, :, :1], dtype=torch.long), x[:1, :, :1])


def into_values(x: Tensor) -> Tensor:
    return x.sin().scatter(2, torch.ones_like(x[..., :1], dtype=torch.long), x[..., :1])


CASES = [
    *((f"max over dim {dim}", gradient_of_max(dim), True) for dim in (0, 1, 2)),
    ("two per row", two_per_row, False),
    ("fewer rows", fewer_rows, False),
    ("into values", into_values, False),
]


@pytest.mark.parametrize(("name", "fn", "rewritten"), CASES, ids=[name for name, *_ in CASES])
def test_the_same_values(name: str, fn: Callable[[Tensor], Tensor], rewritten: bool) -> None:
    x = torch.rand(3, 4, 5, dtype=torch.float64)
    module = make_fx(fn, tracing_mode="fake")(x)
    result = onehot(module)
    targets: list[Any] = [node.target for node in result.graph.nodes]
    assert (chosen in targets) is rewritten
    assert (aten.scatter.src in targets) is not rewritten
    assert torch.equal(result(x), fn(x))
    assert result(x).stride() == fn(x).stride()

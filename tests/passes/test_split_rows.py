"""Rows that variants take of one value are taken at once: each row is theirs, and gradients are joined once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hfusion as hf
from hfusion.passes.gather import gather_stacked
from hfusion.passes.split_rows import split_rows

PARTS = {
    "neighbours": ((0, 1), (2,), (3, 4, 5)),
    "in turn": ((0, 2, 4), (1, 3, 5)),
    "mixed": ((0, 3), (1, 2, 5), (4,)),
}


@pytest.mark.parametrize("name", PARTS)
def test_each_part_has_its_rows_and_their_gradients(name: str) -> None:
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    parts = split_rows(x, PARTS[name])
    for rows, part in zip(PARTS[name], parts, strict=True):
        assert torch.equal(part, x[list(rows)])
    torch.stack([(1 + number) * part.sum() for number, part in enumerate(parts)]).sum().backward()
    assert x.grad is not None
    for number, rows in enumerate(PARTS[name]):
        assert bool((x.grad[list(rows)] == 1 + number).all())


def test_activations_take_their_rows_in_one_call() -> None:
    acts = [nn.ReLU(), nn.Tanh(), nn.ReLU(), nn.GELU()]
    models = [nn.Sequential(nn.Linear(64, 64), act, nn.Linear(64, 64)).double() for act in acts]
    fused = hf.fuse(models)
    x = torch.randn(4, 64, dtype=torch.float64)
    outputs = fused(x)
    for output, model in zip(outputs, models, strict=True):
        torch.testing.assert_close(output, model(x), rtol=1e-9, atol=1e-12)
    targets = [node.target for node in fused.report().parts[0].program.module.graph.nodes]
    assert targets.count(split_rows) == 1
    assert targets.count(gather_stacked) == 1

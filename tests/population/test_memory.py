"""``hf.Population(..., memory=)``: groups and updates of several calls, against the members alone in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.step.memory_budget import block_bytes, state_bytes

RATES = [0.02 * (b + 1) for b in range(5)]
CLIP = 0.05


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2)).double()


def population(models: list[nn.Module], memory: Any, **options: Any) -> hf.Population:
    def optimizer(params: Any) -> Any:
        return hf.optim.Adam(params, lr=RATES[: len(models)], eps=1e-4)

    return hf.Population(
        models, optimizer=optimizer, loss=F.mse_loss, clip_norm=CLIP, compile=False, memory=memory, **options
    )


def memory_for(models: list[nn.Module], x: Tensor, size: int, sums: int) -> int:
    """The least memory for ``size`` members at a time; ``sums``: stacks of gradients of earlier calls."""
    fused = hf.fuse(copy.deepcopy(models))
    opt = hf.optim.Adam(fused.parameters(), lr=0.1)
    program = fused.compiled(Arguments.of((x,), {})).program
    summed = sums * sum(p.nbytes for p in fused.parameters())
    return state_bytes(fused, opt) + summed + block_bytes(program, size, len(x))


@pytest.mark.parametrize("accumulate", [1, 2, [1, 2, 1, 3, 2]], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_members_train_as_alone(size: int, accumulate: Any) -> None:
    torch.manual_seed(0)
    models = [net() for _ in range(5)]
    alone = copy.deepcopy(models)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    pop = population(models, memory_for(models, x, size, 0 if accumulate == 1 else 1), accumulate=accumulate)
    calls = [accumulate] * 5 if isinstance(accumulate, int) else accumulate
    opts = [torch.optim.Adam(m.parameters(), lr=lr, eps=1e-4) for m, lr in zip(alone, RATES, strict=True)]
    for step in range(6):
        losses = pop.step(x + step, y)
        for b, (model, opt) in enumerate(zip(alone, opts, strict=True)):
            loss = F.mse_loss(model(x + step), y)
            (loss / calls[b]).backward()
            torch.testing.assert_close(losses[b], loss.detach(), rtol=1e-9, atol=0)
            if (step + 1) % calls[b] == 0:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                opt.step()
                opt.zero_grad()
    for b, model in enumerate(alone):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(pop.fused.state_dict()[name][b], value, rtol=1e-9, atol=1e-11)
    assert f"{size} of 5 at a time" in str(pop.array._step.report())


def test_groups_share_the_memory() -> None:
    """Memory held by other groups is not available to a group's blocks."""
    torch.manual_seed(0)
    models = [net(), net(), net(), net(6), net(6)]
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    wide = memory_for(models[:3], x, 2, 0)
    other = hf.fuse(copy.deepcopy(models[3:]))
    pop = population(models, wide + state_bytes(other, hf.optim.Adam(other.parameters(), lr=0.1)))
    assert [group.kind for group in pop.groups] == ["array", "array"]
    expected = torch.stack([F.mse_loss(model(x), y) for model in models]).detach()
    torch.testing.assert_close(pop.step(x, y), expected, rtol=1e-9, atol=0)

"""Weights of samples in a population's steps: each member equals that model alone with the weighted loss."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.population.test_own_pace import assert_close

DOUBLE = torch.float64
CLASSES = torch.tensor([0.5, 2.0, 1.0], dtype=DOUBLE)


def labels(count: int) -> Tensor:
    return torch.randint(3, (count,))


def values(count: int) -> Tensor:
    return torch.randn(count, 3, dtype=DOUBLE)


def shares(count: int) -> Tensor:
    return torch.rand(count, 3, dtype=DOUBLE).softmax(1)


def own(output: Tensor, target: Tensor, reduction: str = "sum") -> Tensor:
    losses = (output - target).abs().sum(1)
    return losses if reduction == "none" else losses.sum()


LOSSES: dict[str, tuple[Callable[..., Any], Callable[[int], Tensor]]] = {
    "cross_entropy": (F.cross_entropy, labels),
    "classes": (functools.partial(F.cross_entropy, weight=CLASSES, label_smoothing=0.1), labels),
    "ignored": (nn.CrossEntropyLoss(weight=CLASSES, ignore_index=2), labels),
    "probabilities": (F.cross_entropy, shares),
    "nll": (nn.NLLLoss(), labels),
    "mse": (F.mse_loss, values),
    "sum": (nn.L1Loss(reduction="sum"), values),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), shares),
    "bce": (nn.BCEWithLogitsLoss(), shares),
    "own": (own, values),
}


def repeated(loss: Callable[..., Any], output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """By the definition: a sample of weight k comes k times."""
    index = torch.arange(len(weights)).repeat_interleave(weights)
    return loss(output[index], target[index])


@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_is_how_often_a_sample_comes(name: str) -> None:
    loss, targets = LOSSES[name]
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.LogSoftmax(1)).double() for _ in range(3)]
    alone = copy.deepcopy(models)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01 * (1 + row)) for row, model in enumerate(alone)]
    pop = hf.Population(models, optimizer=lambda p: hf.optim.Adam(p, lr=[0.01, 0.02, 0.03]), loss=loss, compile=False)
    for step in range(4):
        x, y = torch.randn(8, 4, dtype=DOUBLE), targets(8)
        if name == "ignored":
            y[0] = 0
        weights = torch.randint(3, (3, 8))
        weights[:, 0] = 1
        rows = [2, 0] if step == 2 else [0, 1, 2]
        sample_weights: Any = weights[0] if step == 1 else weights[: len(rows)].double()
        if step == 3:
            sample_weights = None
        losses = pop.step(x, y, weights=sample_weights, rows=rows)
        for index, row in enumerate(rows):
            counts = torch.ones(8, dtype=torch.int64) if step == 3 else weights[0 if step == 1 else index]
            optimizers[row].zero_grad()
            value = repeated(loss, alone[row](x), y, counts)
            value.backward()
            optimizers[row].step()
            assert_close(losses[row], value.detach())
    for model, alone_model in zip(pop.models, alone, strict=True):
        assert model is not None
        assert_close(model.state_dict(), alone_model.state_dict())


def test_a_removed_sample_spoils_nothing() -> None:
    torch.manual_seed(0)
    pop = hf.Population(
        [nn.Linear(4, 3).double() for _ in range(2)],
        optimizer=lambda p: hf.optim.SGD(p, lr=0.1),
        loss=F.mse_loss,
        compile=False,
    )
    x, y = torch.randn(4, 4, dtype=DOUBLE), values(4)
    y[1] = torch.nan
    losses = pop.step(x, y, weights=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert bool(losses.isfinite().all())
    assert not pop.frozen


REFUSED: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "negative": (F.mse_loss, torch.tensor([1.0, -1.0]), "at least 0"),
    "infinite": (F.mse_loss, torch.tensor([1.0, torch.inf]), "finite"),
    "all removed": (F.mse_loss, torch.tensor([[1.0, 1.0], [0.0, 0.0]]), "member 1 are 0 for all"),
    "members": (F.mse_loss, torch.ones(3, 2), "3 rows for 2 members"),
    "dims": (F.mse_loss, torch.ones(2, 2, 1), r"\[2, 2, 1\]"),
    "samples": (F.mse_loss, torch.ones(3), "3 weights for losses of shape"),
    "one value": (lambda output, target: (output - target).square().mean(), torch.ones(2), "takes reduction="),
    "lengths": (nn.CTCLoss(), torch.ones(2), "ctc_loss"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    loss, weights, message = REFUSED[name]
    pop = hf.Population(
        [nn.Linear(4, 3).double() for _ in range(2)],
        optimizer=lambda p: hf.optim.SGD(p, lr=0.1),
        loss=loss,
        compile=False,
    )
    with pytest.raises(ValueError, match=message):
        pop.step(torch.randn(2, 4, dtype=DOUBLE), values(2), weights=weights)

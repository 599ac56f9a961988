"""Losses that cannot train raise errors of hfusion that name the remedy, in every function that takes a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.loss_checks import check_losses

Loss = Callable[..., Any]
BATCH = torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])


def step(loss: Loss, compile: bool) -> None:
    fused = hf.fuse([nn.Linear(8, 3) for _ in range(2)])
    hf.train_step(fused, loss, hf.optim.SGD(fused.parameters(), lr=0.1), compile=compile)(*BATCH)


def population(loss: Loss, *others: nn.Module) -> None:
    models = [nn.Linear(8, 3), nn.Linear(8, 3), *others]
    hf.Population(models, optimizer=lambda p: hf.optim.SGD(p, lr=0.1), loss=loss, compile=False).step(*BATCH)


def plain(loss: Loss) -> None:
    models = [nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 3))]
    population = hf.Population(models, optimizer=lambda p: hf.optim.SGD(p, lr=0.1), loss=loss)
    population.step(*BATCH)


def sweep(loss: Loss) -> None:
    pytest.importorskip("optuna")
    hf.sweep(lambda: nn.Linear(8, 3), lambda trial: {"lr": 0.1}, loss, [BATCH], trials=2, epochs=1)


ENTRIES: dict[str, Callable[[Loss], None]] = {
    "eager step": lambda loss: step(loss, False),
    "compiled step": lambda loss: step(loss, True),
    "population": population,
    "mixed population": lambda loss: population(loss, nn.Sequential(nn.Linear(8, 3))),
    "plain members": plain,
    "sweep": sweep,
}


def each_sample(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


LOSSES: dict[str, tuple[Loss, str]] = {
    "number per sample": (each_sample, r"must give one number for .* it gave .*5\]\. Take its mean\."),
    "Python number": (lambda output, target: F.cross_entropy(output, target).item(), "it gave float. Return a tensor"),
    "nothing": (lambda output, target: None, "it gave NoneType. Return a tensor"),
    "detached": (lambda output, target: F.cross_entropy(output.detach(), target), "without detach"),
    "whole numbers": (lambda output, target: (output.argmax(-1) == target).sum(), "of dtype torch.int64, have no grad"),
    "per_model": (hf.per_model(F.cross_entropy), r"is per_model\(cross_entropy\), but .* without hf.per_model"),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_cannot_train(entry: str, kind: str) -> None:
    loss, message = LOSSES[kind]
    with pytest.raises(ValueError, match=message):
        ENTRIES[entry](loss)


def test_a_model_without_trained_parameters_needs_no_gradient() -> None:
    check_losses(torch.tensor(1.0), trains=False)
    with pytest.raises(ValueError, match="let a parameter require a gradient"):
        check_losses(torch.tensor(1.0))

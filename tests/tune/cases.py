"""A small sweep in float64, and its trials trained alone with torch.optim."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from tests.alone import Member, Own

EPOCHS = 4
MACHINE = hf.Machine([hf.Device("cpu", memory="1GiB")], "1GiB")


def data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())


def loaders(generator: torch.Generator | None = None) -> dict[str, Any]:
    """Of which the first is shuffled; its last minibatch is smaller."""
    return {
        "loader": DataLoader(data(90, 0), batch_size=32, shuffle=True, generator=generator),
        "eval_loader": DataLoader(data(40, 1), batch_size=16),
    }


def make_model(hidden: int = 8, batch_norm: bool = False) -> nn.Module:
    norm = [nn.BatchNorm1d(hidden)] if batch_norm else []
    return nn.Sequential(nn.Linear(6, hidden), *norm, nn.ReLU(), nn.Linear(hidden, 2)).double()


def space(trial: Any) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 0.3, log=True),
        "betas": (trial.suggest_float("beta1", 0.5, 0.95), 0.99),
        "weight_decay": trial.suggest_float("weight_decay", 1e-4, 0.5, log=True),
        "hidden": trial.suggest_categorical("hidden", [4, 8]),
        "batch_norm": trial.suggest_categorical("batch_norm", [False, True]),
    }


def sweep(**options: Any) -> hf.SweepResult:
    """Run a sweep of these models, where ``options`` say nothing else."""
    import optuna

    arguments: dict[str, Any] = {
        "make_model": make_model,
        "space": space,
        "loss": F.cross_entropy,
        "trials": 12,
        "epochs": EPOCHS,
        "machine": MACHINE,
        "pruner": optuna.pruners.NopPruner(),
        **loaders(),
        **options,
    }
    if isinstance(arguments.get("study"), optuna.Study):
        del arguments["pruner"]
    else:
        arguments.setdefault("sampler", optuna.samplers.RandomSampler(seed=3))
    return hf.sweep(**arguments)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).double().mean()


def alone(
    params: Mapping[str, Any],
    number: int,
    began: int,
    epochs: int,
    seed: int = 0,
    clip: float | None = None,
    own: int | None = None,
) -> list[tuple[float, ...]]:
    """Of each epoch of a trial: the mean loss of its steps, the loss and the accuracy over the samples to judge by.

    own: the seed of the loader's own generator, if it has one.
    """
    generator = torch.Generator()
    dataloaders = loaders(None if own is None else generator)
    torch.manual_seed(number)
    model = make_model(params["hidden"], params["batch_norm"])
    make = partial(torch.optim.AdamW, betas=(params["beta1"], 0.99), weight_decay=params["weight_decay"])
    member = Member(model, make, F.cross_entropy, Own(params["lr"], norm=math.inf if clip is None else clip))
    values = []
    for epoch in range(epochs):
        torch.manual_seed(seed + began + epoch)
        if own is not None:
            generator.manual_seed(own + seed + began + epoch)
        trained = float(member.epoch(dataloaders["loader"]).mean())
        judges = dataloaders["eval_loader"]
        values.append((trained, member.judged(judges), member.judged(judges, accuracy)))
    return values

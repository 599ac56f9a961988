"""A sweep in which the space chooses for every function, and its trials trained alone with torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import optuna
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hfusion as hf
from tests.alone import Member, Own
from tests.tune.cases import MACHINE, data

# By name, by the class of an array's optimizer, and by that of torch.
OPTIMIZERS = {"sgd": hf.optim.SGD, "adamw": "adamw", "adam": torch.optim.Adam}
ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh}


class ByName(nn.Module):
    """Its activation changes what forward does, and no shape."""

    def __init__(self, hidden: int, activation: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, hidden), nn.Linear(hidden, 2)
        self.activation = activation
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(ACTIVATIONS[self.activation](self.first(x)))


def space(trial: Any) -> dict[str, Any]:
    kind = trial.suggest_categorical("optimizer", list(OPTIMIZERS))
    values = {
        "optimizer": OPTIMIZERS[kind],
        "lr": trial.suggest_float("lr", 1e-3, 0.1, log=True),
        "hidden": trial.suggest_categorical("hidden", [4, 8]),
        "activation": trial.suggest_categorical("activation", list(ACTIVATIONS)),
        "batch_size": trial.suggest_categorical("batch_size", [16, 32]),
        "label_smoothing": trial.suggest_categorical("label_smoothing", [0.0, 0.1]),
        "gamma": trial.suggest_float("gamma", 0.5, 1.0),
        "epochs": trial.suggest_int("epochs", 2, 4),
        "clip_norm": trial.suggest_categorical("clip_norm", [None, 0.1, 1.0]),
        "accumulate": trial.suggest_categorical("accumulate", [1, 2, 4]),
    }
    if kind == "sgd":
        options = {
            "nesterov": trial.suggest_categorical("nesterov", [False, True]),
            "momentum": trial.suggest_float("momentum", 0.1, 0.9),
        }
    else:
        options = {"betas": (trial.suggest_float("beta1", 0.5, 0.95), 0.99)}
    return values | options


def batches(batch_size: int) -> DataLoader[Any]:
    return DataLoader(data(90, 0), batch_size=batch_size, shuffle=True)


def eval_batches() -> DataLoader[Any]:
    return DataLoader(data(40, 1), batch_size=16)


def smoothed(output: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=label_smoothing)


def decay(optimizer: Any, gamma: float) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)


def optimizer(params: Mapping[str, Any]) -> Callable[[Any], torch.optim.Optimizer]:
    if params["optimizer"] == "sgd":
        return partial(torch.optim.SGD, momentum=params["momentum"], nesterov=params["nesterov"])
    return partial(
        torch.optim.AdamW if params["optimizer"] == "adamw" else torch.optim.Adam, betas=(params["beta1"], 0.99)
    )


def alone(trial: Any, interval: str = "epoch") -> list[float]:
    """The values of a trial, one for each epoch, in plain torch."""
    params, values = trial.params, []
    torch.manual_seed(trial.number)
    model = ByName(params["hidden"], params["activation"])
    own = Own(
        params["lr"], partial(decay, gamma=params["gamma"]), params["accumulate"], params["clip_norm"] or math.inf
    )
    loss = partial(smoothed, label_smoothing=params["label_smoothing"])
    member = Member(model, optimizer(params), loss, own)
    for epoch in range(params["epochs"]):
        torch.manual_seed(trial.user_attrs["hfusion:round"] + epoch)
        member.epoch(batches(params["batch_size"]), schedules_steps=interval == "step")
        values.append(member.judged(eval_batches()))
        if interval == "epoch":
            member.step_schedule(values[-1])
    return values


def search(trials: int, folder: str | None = None, **options: Any) -> hf.SweepResult:
    arguments: dict[str, Any] = {
        "scheduler": decay,
        "sampler": optuna.samplers.RandomSampler(seed=3),
        "pruner": optuna.pruners.NopPruner(),
        "machine": MACHINE,
        **options,
    }
    return hf.sweep(
        arguments.pop("make_model", ByName),
        arguments.pop("space", space),
        arguments.pop("loss", smoothed),
        arguments.pop("loader", batches),
        eval_loader=eval_batches(),
        trials=trials,
        epochs=4,
        directory=folder,
        **arguments,
    )


def largest_difference(result: hf.SweepResult, interval: str = "epoch") -> float:
    """The largest relative difference of a reported value to that of the trial alone."""
    largest = 0.0
    for trial in result.trials:
        values = list(trial.intermediate_values.values())
        assert trial.state.name != "COMPLETE" or len(values) == trial.params["epochs"]
        for value, expected in zip(values, alone(trial, interval), strict=False):
            largest = max(largest, abs(value - expected) / abs(expected))
    return largest

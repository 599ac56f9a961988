"""A space may choose for every function of a sweep, and each trial is what it would be alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import hfusion as hf
from tests.alone import Member, Own
from tests.tune import cases
from tests.tune.cases import data
from tests.tune.killed import everything

optuna = pytest.importorskip("optuna")


class Killed(BaseException):
    pass


@pytest.fixture(params=[math.inf, -math.inf], ids=["array", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials train in arrays, or each as a plain model."""
    monkeypatch.setattr("hfusion.tune.trial_placement.seconds_saved", lambda *args: request.param)


@pytest.mark.usefixtures("way")
def test_all_choices_at_once_also_after_a_kill(tmp_path: Path) -> None:
    judged: list[int] = []

    def dying(output: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
        return smoothed(output, target, label_smoothing)

    def kill(study: Any, trial: Any) -> None:
        judged.append(1)
        if len(judged) in (1, 3):
            raise Killed

    # What trials may choose not to do.
    options: dict[str, Any] = {"clip_norm": 0.05}
    whole = search(8, **options)
    assert largest_difference(whole) < 1e-9
    for _ in range(2):
        with pytest.raises(Killed):
            search(8, str(tmp_path), callbacks=[kill], loss=dying, **options)
    assert everything(search(8, str(tmp_path), loss=dying, **options)) == everything(whole)


def test_garbage_is_collected_where_arrays_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfusion.tune.trial_placement.seconds_saved", lambda *args: math.inf)
    collected = list[int]()
    monkeypatch.setattr("hfusion.tune.sweep_workers.gc.collect", lambda: collected.append(1))
    for limit in (1 << 26, 0):
        monkeypatch.setattr("hfusion.tune.sweep_workers._GARBAGE", limit)
        search(4)
        assert bool(collected) is not bool(limit)


class Free(torch.nn.Module):
    """Small, and with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def plateau(optimizer: Any, factor: float) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=factor, patience=0, threshold=0.05)


def cosine(optimizer: Any, epochs: int) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, epochs)


SCHEDULES: dict[str, tuple[Any, dict[str, list[Any]]]] = {
    "plateau": (plateau, {"factor": [0.1, 0.5]}),
    "names that two take": (cosine, {"sweep.epochs": [2, 4], "scheduler.epochs": [3]}),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str) -> None:
    """Trials that join later begin theirs at its begin."""
    make, choices = SCHEDULES[name]

    def space(trial: Any) -> dict[str, Any]:
        names = {key: trial.suggest_categorical(key, values) for key, values in choices.items()}
        return {"lr": trial.suggest_float("lr", 1e-3, 0.1), **names}

    loader = list(torch.utils.data.DataLoader(data(90, 0), batch_size=32))
    options = {"scheduler": make, "scheduler_interval": "epoch", "optimizer": hf.optim.SGD, "rows": 3}
    result = search(7, space=space, make_model=Free, loss=F.cross_entropy, loader=loader, **options)
    assert len({trial.user_attrs["hfusion:round"] for trial in result.trials}) > 1
    for trial in result.trials:
        torch.manual_seed(trial.number)
        arguments = {key: trial.params[key] for key in choices if not key.startswith("sweep.")}
        schedule = partial(make, **{key.removeprefix("scheduler."): value for key, value in arguments.items()})
        member = Member(Free(), torch.optim.SGD, F.cross_entropy, Own(trial.params["lr"], schedule))
        for value in trial.intermediate_values.values():
            member.epoch(loader)
            loss = member.judged(eval_batches())
            assert value == pytest.approx(loss, rel=1e-9)
            member.step_schedule(loss)
        assert len(trial.intermediate_values) == trial.params.get("sweep.epochs", 4)


def by_place(params: Any) -> hf.optim.AdamW:
    params = list(params)
    return hf.optim.AdamW([{"params": params[:2], "lr": 0.02}, {"params": params[2:], "weight_decay": 0.0}])


def three_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def test_param_groups_by_the_places_of_parameters() -> None:
    """A group keeps what it gives itself, and takes the rest from the trial."""
    loader = [(torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)) for _ in range(2)]
    arguments = {"make_model": three_layers, "loss": F.mse_loss, "loader": loader, "eval_loader": None}
    space = {"space": lambda trial: {"weight_decay": trial.suggest_float("weight_decay", 0.1, 0.5)}}
    result = cases.sweep(**arguments, **space, optimizer=by_place, trials=2, epochs=2, processes=0)
    model = three_layers()
    body, head = list(model[0].parameters()), list(model[2].parameters())  # type: ignore[index]
    groups: list[Any] = [
        {"params": body, "lr": 0.02, "weight_decay": result.best_trial.params["weight_decay"]},
        {"params": head, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    for x, y in loader * 2:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(result.best_model.state_dict(), model.state_dict(), rtol=1e-9, atol=1e-11)


# A sweep in which the space chooses for every function, and its trials trained alone with torch.
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
    arguments = {"make_model": ByName, "space": space, "loss": smoothed, "loader": batches, "scheduler": decay}
    return cases.sweep(**{**arguments, "trials": trials, "epochs": 4, "directory": folder, **options})


def largest_difference(result: hf.SweepResult, interval: str = "epoch") -> float:
    """The largest relative difference of a reported value to that of the trial alone."""
    largest = 0.0
    for trial in result.trials:
        values = list(trial.intermediate_values.values())
        assert trial.state.name != "COMPLETE" or len(values) == trial.params["epochs"]
        for value, expected in zip(values, alone(trial, interval), strict=False):
            largest = max(largest, abs(value - expected) / abs(expected))
    return largest

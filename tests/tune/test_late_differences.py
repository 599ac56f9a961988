"""Trials of one structure whose forwards differ, at once or in a later minibatch, train as alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.choices import CHOICES, Chosen
from tests.tune.cases import MACHINE, loaders

optuna = pytest.importorskip("optuna")


class LateChoice(nn.Module):
    """Does what it was chosen for in the last minibatch of an epoch alone, which is smaller."""

    def __init__(self, choice: str) -> None:
        super().__init__()
        self.first, self.last, self.choice = nn.Linear(6, 5), nn.Linear(5, 2), choice
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = getattr(torch, self.choice)(hidden) if len(x) == 26 else torch.tanh(hidden)
        out: Tensor = self.last(hidden)
        return out


def space(trial: Any) -> dict[str, Any]:
    choice = trial.suggest_categorical("choice", ["relu", "sigmoid"])
    return {"lr": trial.suggest_float("lr", 1e-3, 0.1, log=True), "choice": choice}


def test_a_difference_in_the_last_minibatch() -> None:
    data = loaders()
    result = hf.sweep(
        LateChoice,
        space,
        F.cross_entropy,
        data["loader"],
        optimizer=hf.optim.Adam,
        sampler=optuna.samplers.RandomSampler(seed=4),
        pruner=optuna.pruners.NopPruner(),
        trials=8,
        epochs=2,
        rows=8,
        machine=MACHINE,
    )
    assert {trial.params["choice"] for trial in result.trials} == {"relu", "sigmoid"}
    for trial in result.trials:
        torch.manual_seed(trial.number)
        model = LateChoice(trial.params["choice"])
        optimizer = torch.optim.Adam(model.parameters(), lr=trial.params["lr"])
        again = copy.deepcopy(loaders())["loader"]
        for epoch in range(2):
            torch.manual_seed(trial.user_attrs["hfusion:round"] + epoch)
            losses = []
            for inputs, target in again:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        torch.testing.assert_close(trial.value, float(torch.stack(losses).mean()), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["activation by name", "number of steps", "only in evaluation"])
def test_a_sweep_over_what_forward_does(name: str) -> None:
    forward, choices, count = CHOICES[name]

    def space(trial: Any) -> dict[str, Any]:
        choice = choices[trial.suggest_int("choice", 0, len(choices) - 1)]
        return {"lr": trial.suggest_float("lr", 1e-3, 0.1, log=True), "choice": choice}

    data = loaders()
    result = hf.sweep(
        lambda choice: Chosen(choice, forward),
        space,
        F.cross_entropy,
        data.pop("loader"),
        optimizer=hf.optim.SGD,
        sampler=optuna.samplers.RandomSampler(seed=1),
        pruner=optuna.pruners.NopPruner(),
        trials=7,
        epochs=2,
        rows=5,
        machine=MACHINE,
        **data,
    )
    assert len({choices[trial.params["choice"]] for trial in result.trials}) == count
    for trial in result.trials:
        torch.manual_seed(trial.number)
        model = Chosen(choices[trial.params["choice"]], forward)
        opt = torch.optim.SGD(model.parameters(), lr=trial.params["lr"])
        again = loaders()
        for epoch in range(2):
            torch.manual_seed(trial.user_attrs["hfusion:round"] + epoch)
            for inputs, target in again["loader"]:
                opt.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                opt.step()
        model.eval()
        inputs, target = (torch.cat(parts) for parts in zip(*again["eval_loader"], strict=True))
        assert trial.value == pytest.approx(F.cross_entropy(model(inputs), target).item(), rel=1e-9)

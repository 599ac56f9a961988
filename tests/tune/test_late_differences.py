"""Trials of one structure whose forwards differ, at once or in a later minibatch, train as alone."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.tune.cases import MACHINE, loaders

optuna = pytest.importorskip("optuna")


class LateChoice(nn.Module):
    """Does what it was chosen for in all minibatches of an epoch, or in the last one alone, which is smaller."""

    def __init__(self, choice: str, late: bool) -> None:
        super().__init__()
        self.first, self.last, self.choice, self.late = nn.Linear(6, 5), nn.Linear(5, 2), choice, late
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = getattr(torch, self.choice)(hidden) if len(x) == 26 or not self.late else torch.tanh(hidden)
        out: Tensor = self.last(hidden)
        return out


def space(trial: Any) -> dict[str, Any]:
    choice = trial.suggest_categorical("choice", ["relu", "sigmoid"])
    return {"lr": trial.suggest_float("lr", 1e-3, 0.1, log=True), "choice": choice}


@pytest.mark.parametrize("late", [True, False])
def test_trials_whose_forwards_differ(late: bool) -> None:
    data = loaders()
    result = hf.sweep(
        partial(LateChoice, late=late),
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
        model = LateChoice(trial.params["choice"], late)
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

"""Trials whose forwards turn out to differ only in a later minibatch go on as groups of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
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

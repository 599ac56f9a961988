"""Trials whose choices change what forward does are arrays of their own, and those that change numbers are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hfusion as hf
from hfusion.tune.forward_equality import SameForward
from tests.choices import CHOICES, Chosen
from tests.tune.cases import MACHINE, loaders

optuna = pytest.importorskip("optuna")


@pytest.mark.parametrize("name", CHOICES)
def test_models_of_one_structure_fall_into_groups(name: str) -> None:
    forward, choices, count = CHOICES[name]
    models = [Chosen(choice, forward) for choice in choices]
    before = [model.state_dict() for model in models]
    inputs, _ = next(iter(loaders()["loader"]))
    groups: list[SameForward] = []
    for model in models:
        state = torch.get_rng_state()
        if not any(group.same_as(model) for group in groups):
            groups.append(SameForward(model, lambda: inputs, evaluates=True))
        assert torch.equal(torch.get_rng_state(), state)
    assert len(groups) == count
    for model, tensors in zip(models, before, strict=True):
        assert all(torch.equal(value, tensors[key]) for key, value in model.state_dict().items())


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

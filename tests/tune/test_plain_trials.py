"""Trials that are not worth an array run as plain torch, and report what they report in arrays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.device.forked_worker import why_no_fork
from hfusion.tune.array_rows import ArrayRows
from tests.tune import chosen, test_chosen, test_sweep
from tests.tune.cases import MACHINE

optuna = pytest.importorskip("optuna")


@pytest.fixture(autouse=True, params=["here", "elsewhere"])
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "elsewhere":
        if why_no_fork(torch.device("cpu")):
            pytest.skip("no fork of this process could train")
        monkeypatch.setattr("hfusion.tune.sweep.cores", lambda: 2)
    monkeypatch.setattr("hfusion.tune.trial_placement.seconds_saved", lambda *args: -math.inf)
    monkeypatch.setattr(ArrayRows, "join", lambda *args: pytest.fail("an array was made"))


@pytest.mark.parametrize(("pruner", "metric"), [("none", "steps"), ("median", "loss"), ("halving", "accuracy")])
def test_values(pruner: str, metric: str) -> None:
    test_sweep.test_values_are_those_of_trials_alone(pruner, metric)


def test_all_choices_at_once() -> None:
    assert chosen.largest_difference(chosen.search(8)) < 1e-9


def test_a_schedule_that_watches_the_metric() -> None:
    test_chosen.test_schedules("plateau")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def test_param_groups_keep_their_own_rate() -> None:
    data = [(torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 2) for _ in range(3)]

    def make(params: Any) -> hf.optim.SGD:
        return hf.optim.SGD([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], momentum=0.9)

    def double() -> nn.Module:
        return model().double()

    result = hf.sweep(
        double, lambda trial: {"lr": 0.1}, F.cross_entropy, data, optimizer=make, trials=2, epochs=2, machine=MACHINE
    )
    for trial in result.trials:
        torch.manual_seed(trial.number)
        alone = double()
        params = list(alone.parameters())
        groups = [{"params": params[:1], "lr": 0.5}, {"params": params[1:], "lr": 0.1}]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        for _ in range(2):
            losses = []
            for inputs, target in data:
                optimizer.zero_grad()
                loss = F.cross_entropy(alone(inputs), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        assert trial.value == pytest.approx(sum(losses) / 3, rel=1e-9)


def test_loops_say_what_is_wrong_with_a_loss() -> None:
    def unreduced(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    with pytest.raises(ValueError, match=r"the loss must give one number for a member, it gave a tensor \[8\]"):
        hf.sweep(
            lambda: model(),
            lambda trial: {"lr": 0.1},
            unreduced,
            [(torch.randn(8, 6), torch.zeros(8, dtype=torch.long))],
            trials=1,
            epochs=1,
            machine=MACHINE,
        )

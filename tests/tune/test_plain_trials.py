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
from hfusion.tune.plain_trials import torch_optimizer
from hfusion.tune.trial_rows import TrialRows
from tests.tune import chosen, test_chosen, test_sweep
from tests.tune.cases import MACHINE

optuna = pytest.importorskip("optuna")


@pytest.fixture(autouse=True, params=["here", "elsewhere"])
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "elsewhere":
        if why_no_fork(torch.device("cpu")):
            pytest.skip("no fork of this process could train")
        monkeypatch.setattr("hfusion.tune.sweep.cores", lambda: 2)
        monkeypatch.setattr("hfusion.tune.parallel_trials._STARTING", 0.0)
    monkeypatch.setattr("hfusion.tune.shape_array.seconds_saved", lambda *args: -math.inf)
    monkeypatch.setattr(TrialRows, "join", lambda *args: pytest.fail("an array was made"))


@pytest.mark.parametrize(("pruner", "metric"), [("none", "steps"), ("median", "loss"), ("halving", "accuracy")])
def test_values(pruner: str, metric: str) -> None:
    test_sweep.test_values_are_those_of_trials_alone(pruner, metric)


def test_all_choices_at_once() -> None:
    assert chosen.largest_difference(chosen.search(8)) < 1e-9


def test_a_schedule_that_watches_the_metric() -> None:
    test_chosen.test_schedules("plateau")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


OPTIMIZERS: dict[str, tuple[Any, type[torch.optim.Optimizer] | None]] = {
    "adamw": (lambda params: hf.optim.AdamW(params, lr=0.2, betas=(0.8, 0.9), amsgrad=True), torch.optim.AdamW),
    "sgd": (lambda params: hf.optim.SGD(params, momentum=0.9, nesterov=True), torch.optim.SGD),
    "groups": (
        lambda params: hf.optim.SGD([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], lr=0.1),
        torch.optim.SGD,
    ),
    "lion": (hf.optim.Lion, None),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_torch_s(name: str) -> None:
    make, kind = OPTIMIZERS[name]
    optimizer = torch_optimizer(make, model())
    if kind is None:
        assert optimizer is None
        return
    assert type(optimizer) is kind
    if name == "groups":
        assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == [(0.5, 1), (0.1, 3)]
    if name == "adamw":
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["amsgrad"], group["fused"]) == (0.2, (0.8, 0.9), True, True)
    if name == "sgd":
        assert optimizer.param_groups[0]["nesterov"]


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

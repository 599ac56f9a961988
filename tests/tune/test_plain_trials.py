"""Trials that are not worth an array run as plain torch, and report what they report in arrays."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.device.calibrate import Rates
from hfusion.device.forked_process import why_no_fork
from hfusion.tune.parallel_trials import TrialSpread
from hfusion.tune.plain_trial_footprint import PlainFootprint, fastest_width
from hfusion.tune.plain_trials import torch_optimizer
from hfusion.tune.trial_rows import TrialRows
from tests.tune import chosen, test_chosen, test_objectives, test_resume, test_sweep
from tests.tune.cases import EPOCHS, MACHINE, alone
from tests.tune.killed import everything, run
from tests.tune.test_trial_placement import nowhere

optuna = pytest.importorskip("optuna")


@pytest.fixture(autouse=True, params=["here", "elsewhere"])
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "elsewhere":
        if why_no_fork(torch.device("cpu")):
            pytest.skip("no fork of this process could train")
        monkeypatch.setattr("hfusion.tune.parallel_trials.cores", lambda: 2)
        monkeypatch.setattr("hfusion.tune.parallel_trials.start_seconds", lambda: 0.0)
        # Whether it is faster here decides nothing.
        monkeypatch.setattr(TrialSpread, "_judge", lambda *args: None)
    monkeypatch.setattr("hfusion.tune.shape_array.seconds_saved", lambda choice: -math.inf)
    monkeypatch.setattr(TrialRows, "join", lambda *args: pytest.fail("an array was made"))


@pytest.mark.parametrize(("pruner", "metric"), [("none", "steps"), ("median", "loss"), ("halving", "accuracy")])
def test_values(pruner: str, metric: str) -> None:
    test_sweep.test_values_are_those_of_trials_alone(pruner, metric)


def test_clip() -> None:
    test_sweep.test_gradients_are_clipped_as_alone()


def test_all_choices_at_once() -> None:
    assert chosen.largest_difference(chosen.search(8)) < 1e-9


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_schedules(interval: str) -> None:
    result = chosen.search(5, scheduler_interval=interval)
    assert chosen.largest_difference(result, interval) < 1e-9


def test_a_schedule_that_watches_the_metric() -> None:
    test_chosen.test_schedules("plateau")


@pytest.mark.parametrize("metric", [test_objectives.both, test_objectives.Both()], ids=["function", "updated"])
def test_several_objectives(metric: Any) -> None:
    test_objectives.test_values_are_those_of_trials_alone(metric)


def test_killed_and_resumed(tmp_path: Path) -> None:
    whole = {"tpe": everything(run(str(tmp_path / "whole"), test_resume.nothing, "tpe"))}
    kills = [("suggested", 5), ("judged", 4), ("reported", 1), ("kept", 8), ("pruned", 2)]
    test_resume.test_killed_again_and_again("tpe", kills, whole, tmp_path / "killed")


def test_objectives_over_a_kill(tmp_path: Path) -> None:
    test_objectives.test_killed_again_and_again(tmp_path)


def test_a_member_that_goes_bad_fails_alone() -> None:
    test_objectives.test_a_member_that_goes_bad_fails_alone()


def test_dropout_draws_as_alone() -> None:
    """In an array members draw together; a plain trial draws what the loop over its minibatches would."""
    data = [(torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 2) for _ in range(3)]

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()

    def space(trial: Any) -> dict[str, Any]:
        return {"lr": trial.suggest_float("lr", 0.01, 0.1)}

    before = torch.get_rng_state()
    result = hf.sweep(make, space, F.cross_entropy, data, trials=3, epochs=2, machine=MACHINE)
    assert torch.equal(before, torch.get_rng_state())
    for trial in result.trials:
        torch.manual_seed(trial.number)
        model = make()
        opt = torch.optim.AdamW(model.parameters(), lr=trial.params["lr"])
        for epoch, value in trial.intermediate_values.items():
            torch.manual_seed(trial.user_attrs["hfusion:round"] + epoch)
            losses = []
            for x, y in data:
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                opt.step()
                losses.append(loss.item())
            assert value == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def test_the_best_model_is_as_trained() -> None:
    result = test_sweep.sweep(5, pruner=optuna.pruners.NopPruner())
    best = result.best_trial
    values = alone(best.params, best.number, best.user_attrs["hfusion:round"], EPOCHS)
    assert result.best_value == pytest.approx(values[-1][1], rel=1e-9)
    assert all(param.grad is None for param in result.best_model.parameters())


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


def test_a_footprint_counts_what_one_trial_takes() -> None:
    device = nowhere(1).devices[0]
    assert isinstance(device.rates, Rates)
    net, x = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10)), torch.randn(20, 100)
    before, ended = torch.get_rng_state(), threading.Event()
    # Beside another thread draws come from a generator of their own.
    waiting = threading.Thread(target=ended.wait)
    waiting.start()
    try:
        footprint = PlainFootprint(nn.Sequential(net, nn.Dropout(0.5)), 2, x, device, evaluated=0, saved=False)
    finally:
        ended.set()
        waiting.join()
    assert torch.equal(before, torch.get_rng_state())
    weights = 4 * sum(param.numel() for param in net.parameters())
    assert footprint.held(3) == 4 * weights + 3 * 3 * weights
    assert weights < footprint.passing(1) < 10 * weights
    assert footprint.seconds(0) == 0 < footprint.seconds(1) < footprint.seconds(2) < 2 * footprint.seconds(1)
    assert 1 < fastest_width(footprint.seconds, 10**6) < 10**6


@pytest.mark.parametrize("function", [torch.sigmoid, torch.exp, lambda x: x.softmax(1), lambda x: F.dropout(x, 0.5)])
def test_nothing_of_a_forward_outlives_a_sweep(function: Any) -> None:
    """Also of operators that save their own result for backward."""
    results: list[Any] = []

    class Net(nn.Module):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, hidden), nn.Linear(hidden, 2)

        def forward(self, x: Tensor) -> Tensor:
            result = function(self.first(x))
            results.append(weakref.ref(result))
            return self.second(result)

    data = [(torch.randn(8, 6), torch.arange(8) % 2)]
    options: dict[str, Any] = {"trials": 3, "epochs": 1, "machine": MACHINE, "processes": 0}
    hf.sweep(Net, lambda trial: {"hidden": 3 + trial.number}, F.cross_entropy, data, **options)
    gc.collect()
    assert results
    assert not [result for result in results if result() is not None]


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

"""Population based training in a sweep: which trials are copied, and that copies train on as their originals would."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hfusion as hf
from tests.alone import Member, Own
from tests.tune import cases
from tests.tune.cases import loaders, make_model

optuna = pytest.importorskip("optuna")
TRIALS, EPOCHS = 8, 5


class Killed(BaseException):
    pass


def sweep(folder: Path | None = None, kill: int = 0, **options: Any) -> hf.SweepResult:
    judged = []

    def space(trial: Any) -> dict[str, Any]:
        return {
            "lr": trial.suggest_float("lr", 1e-4, 0.3, log=True),
            "momentum": trial.suggest_float("momentum", 0.0, 0.9),
            "hidden": 4 * trial.suggest_int("width", 1, 2),
            "clip_norm": trial.suggest_float("clip_norm", 0.02, 0.5, log=True),
        }

    def metric(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        judged.append(1)
        if len(judged) == kill:
            raise Killed
        return F.cross_entropy(output, target)

    arguments = {"pbt": hf.PBT(), "optimizer": hf.optim.SGD, "sampler": optuna.samplers.RandomSampler(seed=2)}
    arguments |= {"space": space, "metric": metric, "trials": TRIALS, "epochs": EPOCHS, "rows": TRIALS}
    return cases.sweep(**{**arguments, "directory": folder, **options})


def alone(trials: list[Any]) -> list[list[float]]:
    """The values of all trials in plain torch, copied as was noted."""

    def begin(member: Member, params: dict[str, Any]) -> None:
        member.own.norm = params["clip_norm"]
        member.opt.param_groups[0].update(lr=params["lr"], momentum=params["momentum"])

    data, runs, values = loaders(), [], [[] for _ in trials]
    for trial in trials:
        torch.manual_seed(trial.number)
        first = trial.user_attrs.get("hfusion:suggested", trial.params)
        runs.append(Member(make_model(4 * first["width"]), torch.optim.SGD, F.cross_entropy, Own()))
        begin(runs[-1], first)
    for epoch in range(EPOCHS):
        for number, member in enumerate(runs):
            torch.manual_seed(epoch)
            member.epoch(data["loader"])
            values[number].append(member.judged(data["eval_loader"]))
        before = list(runs)
        for number, trial in enumerate(trials):
            for event in trial.user_attrs.get("hfusion:copies", []):
                if event["epoch"] == epoch + 1:
                    runs[number] = copy.deepcopy(before[event["source"]])
                    begin(runs[number], event["params"])
    return values


def noted(result: hf.SweepResult) -> list[Any]:
    return [
        (trial.params, trial.intermediate_values, trial.user_attrs.get("hfusion:copies")) for trial in result.trials
    ]


@pytest.fixture(scope="module")
def whole() -> hf.SweepResult:
    return sweep()


def test_copies_train_as_their_originals_would(whole: hf.SweepResult) -> None:
    for trial, values in zip(whole.trials, alone(whole.trials), strict=True):
        assert list(trial.intermediate_values.values()) == pytest.approx(values, rel=1e-9)
        assert trial.state.name == "COMPLETE"


def test_the_worst_of_a_shape_become_copies_of_its_best(whole: hf.SweepResult) -> None:
    trials, copied = whole.trials, 0
    for width in (1, 2):
        candidates = [trial for trial in trials if trial.params["width"] == width]
        for epoch in range(1, EPOCHS):
            ranked = sorted(candidates, key=lambda trial, epoch=epoch: trial.intermediate_values[epoch - 1])
            count = min(-(-len(candidates) // 4), len(candidates) // 2)
            events = {
                trial.number: event
                for trial in candidates
                for event in trial.user_attrs.get("hfusion:copies", [])
                if event["epoch"] == epoch
            }
            assert set(events) == {trial.number for trial in ranked[len(ranked) - count :]}
            assert {event["source"] for event in events.values()} <= {trial.number for trial in ranked[:count]}
            assert all(event["params"]["width"] == width for event in events.values())
            copied += len(events)
    assert copied > 4


def test_a_killed_one_goes_on(whole: hf.SweepResult, tmp_path: Path) -> None:
    for kill in (12, 21):
        with pytest.raises(Killed):
            sweep(tmp_path, kill)
    resumed = sweep(tmp_path)
    assert noted(resumed) == noted(whole)
    assert resumed.best_value == whole.best_value


def test_values_stay_in_their_bounds() -> None:
    floats, ints = optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution
    distributions = {
        "log": floats(1e-4, 1e-1, log=True),
        "step": floats(0.0, 1.0, step=0.25),
        "int": ints(2, 9),
        "even": ints(2, 8, step=2),
        "choice": optuna.distributions.CategoricalDistribution(["a", None]),
    }
    params: dict[str, Any] = {"log": 1e-4, "step": 0.5, "int": 9, "even": 8, "choice": "a"}
    draw, choices = random.Random(0), set()
    for _ in range(300):
        params = hf.PBT().explored(params, distributions, lambda changed: True, draw)
        choices.add(params["choice"])
        for name, distribution in distributions.items():
            assert distribution._contains(distribution.to_internal_repr(params[name])), (name, params[name])
    assert choices == {"a", None}
    anew = hf.PBT(resample_probability=1.0)
    drawn = [anew.explored(params, distributions, lambda changed: True, draw)["log"] for _ in range(300)]
    # Half of all draws from a log range lie below its geometric mean.
    assert 100 < sum(value < 10**-2.5 for value in drawn) < 200

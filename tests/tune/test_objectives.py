"""Several objectives: values are those of the trials alone, and what is best is Optuna's Pareto front."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import lr_scheduler

import hfusion as hf
from tests.tune.cases import EPOCHS, accuracy, alone, loaders
from tests.tune.test_sweep import sweep

optuna = pytest.importorskip("optuna")

DIRECTIONS = ["minimize", "maximize"]


def both(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target), accuracy(output, target)


class Both:
    """In the manner of torchmetrics."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.parts: list[tuple[Tensor, Tensor]] = []

    def update(self, output: Tensor, target: Tensor) -> None:
        self.parts.append((output, target))

    def __call__(self, output: Tensor, target: Tensor) -> Any:
        raise AssertionError("evaluated by update and compute")

    def compute(self) -> Tensor:
        output, target = (torch.cat(part) for part in zip(*self.parts, strict=True))
        return torch.stack(both(output, target))


def nsga(seed: int = 2) -> Any:
    return optuna.samplers.NSGAIISampler(population_size=4, seed=seed)


@pytest.mark.parametrize("metric", [both, Both()], ids=["function", "updated"])
def test_values_are_those_of_trials_alone(metric: Any) -> None:
    result = sweep(14, directions=DIRECTIONS, metric=metric, sampler=nsga())
    for trial in result.trials:
        expected = alone(trial.params, trial.number, trial.user_attrs["hfusion:round"], EPOCHS)[-1]
        assert trial.values == pytest.approx(expected[1:], rel=1e-9)
        assert not trial.intermediate_values
    front = result.best_trials
    assert [trial.number for trial in front] == list(result.best_models)
    for trial in front:
        model = result.best_models[trial.number].eval()
        outputs = torch.cat([model(inputs) for inputs, _ in loaders()["eval_loader"]])
        target = torch.cat([target for _, target in loaders()["eval_loader"]])
        assert trial.values == pytest.approx([value.item() for value in both(outputs, target)], rel=1e-12)


def stored(folder: Path, reached: Any) -> hf.SweepResult:
    def space(trial: Any) -> dict[str, Any]:
        reached("asked")
        return {
            "lr": trial.suggest_float("lr", 1e-4, 0.3, log=True),
            "hidden": trial.suggest_categorical("hidden", [4, 8]),
            "epochs": trial.suggest_int("epochs", 1, 3),
        }

    def judged(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        reached("judged")
        return both(output, target)

    def callback(study: Any, trial: Any) -> None:
        reached("told")

    return sweep(
        12,
        directions=DIRECTIONS,
        metric=judged,
        space=space,
        rows=5,
        sampler=nsga(),
        directory=folder,
        callbacks=[callback],
    )


def test_a_value_that_is_nan_fails_its_trial() -> None:
    def judged(output: Tensor, target: Tensor) -> tuple[float, float]:
        loss, hits = both(output, target)
        return float(loss), float("nan") if hits < 0.5 else float(hits)

    result = sweep(10, directions=DIRECTIONS, metric=judged)
    states = {trial.state.name for trial in result.trials}
    assert states == {"COMPLETE", "FAIL"}
    assert all(trial.values[1] >= 0.5 for trial in result.trials if trial.state.name == "COMPLETE")


def plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": None}, "2 objectives need a metric that returns 2 values"),
        ({"pruner": "median"}, "pruner=MedianPruner decides by one value, and there are 2 objectives"),
        ({"pbt": hf.PBT()}, "pbt ranks trials by one value, and there are 2 objectives"),
        ({"scheduler": plateau}, "a ReduceLROnPlateau watches one value, and there are 2 objectives"),
        ({"direction": "minimize"}, "direction='minimize' and directions=.*: give one of them"),
        ({"metric": accuracy}, "the metric returned 1 value for one member, and the study has 2 objectives"),
        ({"metric": lambda *args: (1.0, 2.0, 3.0)}, "returned 3 values for one member"),
        ({"metric": lambda *args: (1.0, "two")}, "the metric must give a number for one member, got str"),
    ],
)
def test_what_needs_one_objective(options: dict[str, Any], message: str) -> None:
    if options.get("pruner") == "median":
        options = {"pruner": optuna.pruners.MedianPruner()}
    with pytest.raises(ValueError, match=message):
        sweep(2, **{"directions": DIRECTIONS, "metric": both, **options})


def test_a_study_says_its_directions() -> None:
    """As study.optimize does, a sweep asks no pruner of a study of several objectives."""
    study = optuna.create_study(directions=DIRECTIONS, pruner=optuna.pruners.MedianPruner(n_startup_trials=0))
    result = sweep(5, study=study, metric=both)
    assert {trial.state.name for trial in result.trials} == {"COMPLETE"}
    with pytest.raises(ValueError, match=r"directions=.*: the study given has its own"):
        sweep(1, study=study, metric=both, directions=DIRECTIONS)
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(study_name="stored", storage=storage, directions=DIRECTIONS)
    with pytest.raises(ValueError, match="study 'stored' was made to minimize, maximize"):
        sweep(1, study="stored", storage=storage, metric=both, directions=["minimize", "minimize"])
    with pytest.raises(ValueError, match="study 'stored' was made to minimize, maximize"):
        sweep(1, study="stored", storage=storage, metric=both, direction="minimize")
    assert len(sweep(2, study="stored", storage=storage, metric=both).best_models) >= 1


def test_one_direction_in_a_list_is_one_objective() -> None:
    result = sweep(4, directions=["maximize"], metric=accuracy)
    assert list(result.best_models) == [result.best_trial.number]
    assert result.best_model is result.best_models[result.best_trial.number]
    assert len(result.trials[0].intermediate_values) == EPOCHS


STORAGES: dict[str, Any] = {
    "memory": lambda folder: {},
    "journal": lambda folder: {"directory": folder},
    "sqlite": lambda folder: {"storage": f"sqlite:///{folder}/study.db"},
}


@pytest.mark.parametrize("rounds", ["together", "asynchronous"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("directions", [["minimize"], ["maximize"], DIRECTIONS], ids=len)
def test_models_are_those_of_the_best_trials(directions: list[str], storage: str, rounds: str, tmp_path: Path) -> None:
    """With few values, so that trials tie, some of them NaN, and trials that end in another order than they begin."""

    def judged(output: Tensor, target: Tensor) -> Any:
        draw = random.Random(float(output.sum()))
        values = [draw.choice([0.0, 0.0, 1.0, float("inf"), float("nan")]) for _ in directions]
        return values[0] if len(directions) == 1 else tuple(values)

    result = sweep(
        9,
        directions=directions,
        metric=judged,
        space=lambda trial: {"lr": trial.suggest_float("lr", 1e-3, 0.1), "hidden": 4, "epochs": 3 - trial.number % 3},
        rows=3,
        pruner=optuna.pruners.NopPruner() if len(directions) == 1 else None,
        rounds=rounds,
        **STORAGES[storage](tmp_path),
    )
    best = [result.best_trial] if len(directions) == 1 else result.best_trials
    assert list(result.best_models) == [trial.number for trial in best]
    if len(directions) == 1:
        assert str(result).splitlines()[2].split()[0] == str(best[0].number)


@pytest.mark.filterwarnings("ignore:.*constraints_func")
@pytest.mark.parametrize("directions", [["minimize"], DIRECTIONS], ids=len)
@pytest.mark.parametrize("kept", [lambda number: number % 2, lambda number: 0], ids=["some", "none"])
def test_trials_that_break_a_constraint_are_not_the_best(directions: list[str], kept: Any) -> None:
    sampler = optuna.samplers.TPESampler(seed=0, constraints_func=lambda trial: (0.5 - kept(trial.number),))
    metric = both if len(directions) > 1 else accuracy
    result = sweep(6, directions=directions, metric=metric, sampler=sampler, pruner=optuna.pruners.NopPruner())
    if kept(1):
        best = [result.best_trial] if len(directions) == 1 else result.best_trials
        assert list(result.best_models) == [trial.number for trial in best]
        assert all(kept(trial.number) for trial in best)
    else:
        assert not result.best_models
        with pytest.raises(ValueError if len(directions) == 1 else RuntimeError, match="best model"):
            _ = result.best_model

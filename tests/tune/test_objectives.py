"""Several objectives: values are those of the trials alone, and what is best is Optuna's Pareto front."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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

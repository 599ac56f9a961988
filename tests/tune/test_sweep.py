"""Every value that a sweep reports is that of the trial trained alone, every decision the pruner's on these reports."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hfusion as hf
from hfusion.tune.trial_placement import TrialPlacement
from tests.tune import cases
from tests.tune.cases import EPOCHS, accuracy, alone, loaders

optuna = pytest.importorskip("optuna")


def sweep(trials: int, **options: Any) -> hf.SweepResult:
    return cases.sweep(**{"trials": trials, "rows": 6, **options})


class Recorded(optuna.pruners.BasePruner):  # type: ignore[misc,name-defined]
    """A pruner that records its decisions in order: trial, step, decision."""

    def __init__(self, pruner: Any) -> None:
        self._pruner, self.said = pruner, list[tuple[int, int, bool]]()

    def prune(self, study: Any, trial: Any) -> bool:
        decision = bool(self._pruner.prune(study, trial))
        self.said.append((trial.number, trial.last_step, decision))
        return decision


def decided_anew(
    result: hf.SweepResult, decisions: list[tuple[int, int, bool]], pruner: Any
) -> list[tuple[int, int, bool]]:
    """Return the decisions of a pruner if only the same values are reported, in the same order."""
    again = optuna.create_study(study_name=result.study.study_name, direction=result.study.direction, pruner=pruner)
    trials, replayed = [again.ask() for _ in result.trials], []
    for number, step, _ in decisions:
        trials[number].report(result.trials[number].intermediate_values[step], step)
        replayed.append((number, step, trials[number].should_prune()))
        if replayed[-1][2]:
            again.tell(number, state=optuna.trial.TrialState.PRUNED)
        elif step == EPOCHS - 1:
            again.tell(number, result.trials[number].value)
    return replayed


PRUNERS = {
    "none": lambda: optuna.pruners.NopPruner(),
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=2),
    "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=EPOCHS, reduction_factor=2),
}
METRICS = {"steps": (None, "minimize", 0), "loss": (None, "minimize", 1), "accuracy": (accuracy, "maximize", 2)}


@pytest.mark.parametrize(
    ("pruner", "metric", "own"), [("none", "steps", 5), ("median", "loss", None), ("halving", "accuracy", None)]
)
def test_values_are_those_of_trials_alone(pruner: str, metric: str, own: int | None) -> None:
    """With a loader that has a generator of seed ``own``, or none."""
    function, direction, column = METRICS[metric]
    options = {"eval_loader": None} if metric == "steps" else {}
    generator = None if own is None else torch.Generator().manual_seed(own)
    options |= {"loader": loaders(generator)["loader"]}
    result = sweep(14, pruner=PRUNERS[pruner](), metric=function, direction=direction, **options)
    assert {"hidden": {4, 8}, "batch_norm": {False, True}} == {
        name: {trial.params[name] for trial in result.trials} for name in ("hidden", "batch_norm")
    }
    for trial in result.trials:
        values = [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]
        expected = alone(trial.params, trial.number, trial.user_attrs["hfusion:round"], len(values), own=own)
        assert values == pytest.approx([row[column] for row in expected], rel=1e-9, abs=1e-12)
        assert trial.value == values[-1]
    states = [trial.state.name for trial in result.trials]
    assert set(states) == ({"COMPLETE"} if pruner == "none" else {"COMPLETE", "PRUNED"})
    assert all(len(trial.intermediate_values) == EPOCHS for trial in result.trials if trial.state.name == "COMPLETE")


@pytest.mark.parametrize("name", PRUNERS)
def test_decisions_are_those_of_the_pruner_on_these_values(name: str) -> None:
    recorded = Recorded(PRUNERS[name]())
    result = sweep(16, pruner=recorded)
    assert decided_anew(result, recorded.said, PRUNERS[name]()) == recorded.said
    ended = {number: "PRUNED" if pruned else "COMPLETE" for number, _, pruned in recorded.said}
    assert ended == {trial.number: trial.state.name for trial in result.trials}
    assert any(pruned for _, _, pruned in recorded.said) == (name != "none")


def test_the_best_model_is_that_of_the_best_trial() -> None:
    result = sweep(8, pruner=optuna.pruners.NopPruner(), metric=accuracy, direction="maximize")
    best = result.best_trial
    model = result.best_model.eval()
    batches = list(loaders()["eval_loader"])
    output = torch.cat([model(inputs) for inputs, _ in batches])
    assert float(accuracy(output, torch.cat([target for _, target in batches]))) == result.best_value == best.value
    assert model[0].out_features == result.best_params["hidden"]  # type: ignore[index,union-attr]
    lines = str(result).splitlines()
    assert lines[0].endswith("8 trials: 8 complete")
    assert f"{best.value:.6g}" in lines[2]
    assert all(len(line) <= 100 for line in lines)


def test_arrays_that_made_room_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an array has memory only once others without trials are gone, which goes itself."""
    options: dict[str, Any] = {"rows": 2, "epochs": 1, "pruner": optuna.pruners.NopPruner()}
    options["space"] = lambda trial: {"lr": trial.suggest_float("lr", 1e-3, 0.1), "hidden": 4 + trial.number % 2}
    expected = sweep(6, **options)
    fits, refused = TrialPlacement._fits, list[int]()

    def tight(self: Any, device: int, arrays: Any, more: Any = None) -> bool:
        arrays = list(arrays)
        if any(not array.trial_count and array is not more for array in arrays):
            refused.append(device)
            return False
        return fits(self, device, arrays, more)

    monkeypatch.setattr(TrialPlacement, "_fits", tight)
    result = sweep(6, **options)
    assert len(refused) >= 2
    assert [trial.values for trial in result.trials] == [trial.values for trial in expected.trials]


# Several objectives: values are those of the trials alone, and what is best is Optuna's Pareto front.

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
def test_values_of_objectives_are_those_of_trials_alone(metric: Any) -> None:
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

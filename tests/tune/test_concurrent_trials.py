"""How many trials train at a time by default: as many as the sampler and the pruner learn from."""

import optuna
import pytest
import torch
from optuna import pruners, samplers
from torch import nn

import hfusion as hf

TRIALS = 20
GRID = {"lr": [k / 100 for k in range(1, TRIALS + 1)], "momentum": [0.0]}


class Own(samplers.BaseSampler):
    """A sampler of a user, of which nothing is known."""

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, name, distribution):
        return distribution.low


def running(sampler, pruner, *, trials=TRIALS, directions=None, **options):
    """Return the number of running trials each time that a trial is asked for, itself included."""
    study = optuna.create_study(sampler=sampler, pruner=pruner, directions=directions)
    counts = []

    def space(trial):
        states = [other.state for other in study.get_trials(deepcopy=False)]
        counts.append(states.count(optuna.trial.TrialState.RUNNING))
        return {"lr": trial.suggest_float("lr", 0.001, 0.2), "momentum": trial.suggest_float("momentum", 0.0, 0.9)}

    if directions:
        options["metric"] = lambda y, t: ((y - t).square().mean(), y.square().mean())
    hf.sweep(
        lambda: nn.Linear(2, 1),
        space,
        nn.functional.mse_loss,
        [(torch.ones(4, 2), torch.zeros(4, 1))],
        trials=trials,
        epochs=2,
        optimizer=hf.optim.SGD,
        study=study,
        processes=0,
        **options,
    )
    return counts


CASES = {
    "random": (lambda: samplers.RandomSampler(seed=0), pruners.NopPruner, TRIALS),
    "random, a fixed threshold": (
        lambda: samplers.RandomSampler(seed=0),
        lambda: pruners.ThresholdPruner(upper=1e9),
        TRIALS,
    ),
    "random, a median": (lambda: samplers.RandomSampler(seed=0), pruners.MedianPruner, 4),
    "tpe": (lambda: samplers.TPESampler(seed=0), pruners.NopPruner, 4),
    "random with a fixed value": (
        lambda: samplers.PartialFixedSampler({"momentum": 0.5}, samplers.RandomSampler(seed=0)),
        pruners.NopPruner,
        TRIALS,
    ),
    "a population of eight": (lambda: samplers.NSGAIISampler(population_size=8, seed=0), pruners.NopPruner, 8),
    "a user's sampler": (Own, pruners.NopPruner, 4),
}


# Optuna calls some of its samplers and pruners experimental.
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("case", CASES)
def test_by_default_as_many_trials_as_the_search_learns_from(case):
    sampler, pruner, most = CASES[case]
    assert max(running(sampler(), pruner())) == most


@pytest.mark.parametrize("rows", [1, 3, TRIALS])
def test_rows_says_more_or_less(rows):
    assert max(running(samplers.TPESampler(seed=0), pruners.MedianPruner(), rows=rows)) == rows

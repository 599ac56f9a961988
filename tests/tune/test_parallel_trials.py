"""Plain trials in other processes: which trials move there, what they return, and that no process remains."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from optuna import pruners, samplers
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.errors import HFusionError
from hfusion.device.team import torch_threads
from hfusion.device.worker_process import why_no_fork
from hfusion.tune.sweep_workers import SweepWorkers
from tests.tune.cases import sweep

pytest.importorskip("optuna")

HERE = os.getpid()


@pytest.fixture(autouse=True)
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if reason := why_no_fork(torch.device("cpu")):
        pytest.skip(reason)
    monkeypatch.setattr("hfusion.tune.trial_placement.seconds_saved", lambda *args: -math.inf)
    yield
    assert not multiprocessing.active_children()


def process(outputs: Tensor, target: Tensor) -> float:
    """Return the id of the process that evaluates."""
    return float(os.getpid())


class _Handle:
    """Something of this process alone."""

    def __reduce__(self) -> Any:
        raise TypeError("a handle stays")

    def __deepcopy__(self, memo: Any) -> _Handle:
        return self


class Unpicklable(nn.Linear):
    """A layer with a handle that cannot leave its process."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.handle = _Handle()


def search(make_model: Any = lambda: nn.Linear(3, 2), **options: Any) -> hf.SweepResult:
    data = [(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(2)]
    arguments = {"make_model": make_model, "space": lambda trial: {"lr": trial.suggest_float("lr", 0.01, 0.1)}}
    arguments |= {"loader": data, "eval_loader": None, "trials": 6, "epochs": 3, "processes": 2, "rows": 6}
    return sweep(**{**arguments, **options})


def where(result: hf.SweepResult) -> list[set[float]]:
    """The processes in which each trial was evaluated."""
    return [set(trial.intermediate_values.values()) for trial in result.trials]


def test_trials_are_in_as_many_processes_as_were_given() -> None:
    places = where(search(metric=process))
    assert len(set.union(*places)) == 2
    assert all(len(trial) == 1 and HERE not in trial for trial in places)


def test_the_trials_of_a_round_are_shared_out() -> None:
    """Each round trains trials of its own, and the processes take as many."""
    places = where(search(metric=process, rows=4, trials=12, epochs=1))
    for start in (0, 4, 8):
        counts = Counter(place for trial in places[start : start + 4] for place in trial)
        assert sorted(counts.values()) == [2, 2]


def test_none_where_none_were_given() -> None:
    assert set.union(*where(search(metric=process, processes=0))) == {HERE}


def test_models_that_cannot_be_pickled_stay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hfusion"):
        assert set.union(*where(search(Unpicklable, metric=process))) == {HERE}
    assert "trial 1 stays in this process, as pickle fails" in caplog.text


def test_only_one_of_the_trials_that_share_a_tensor_leaves() -> None:
    frozen = nn.Linear(3, 3).requires_grad_(False)
    widths = iter([4, 5, 6, 7, 8, 9])

    def make() -> nn.Module:
        width = next(widths)
        return nn.Sequential(frozen, nn.Linear(3, width), nn.Linear(width, 2))

    # The best trial is one that stays, as the model of another would be made again here.
    places = where(search(make, metric=lambda *_: float(os.getpid() != HERE)))
    assert sum(trial == {1.0} for trial in places) == 1


def threads(outputs: Tensor, target: Tensor) -> float:
    return float(torch.get_num_threads())


@pytest.mark.parametrize(
    ("make_model", "processes", "expected"),
    [(lambda: nn.Linear(3, 2), 2, 1.0), (Unpicklable, 2, 1.0), (lambda: nn.Linear(3, 2), 1, 2.0)],
)
def test_trials_have_one_thread_each_if_they_may_have_processes(
    make_model: Any, processes: int, expected: float
) -> None:
    """Also those that stay here: the number of threads affects rounding."""
    with torch_threads(2):
        result = search(make_model, metric=threads, processes=processes)
    assert [set(trial.intermediate_values.values()) for trial in result.trials] == [{expected}] * 6


def test_the_default_is_a_process_per_core_for_two_trials_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfusion.tune.sweep.cores", lambda: 8)
    for trials, expected in ((2, 0), (6, 3)):
        places = where(search(metric=process, processes=None, trials=trials))
        assert len(set.union(*places) - {HERE}) == expected


class Waiting(nn.ReLU):
    """Takes so many seconds at least that the other process ends all other trials meanwhile."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def test_a_long_trial_has_a_worker_of_its_own() -> None:
    """The longest go first, each to the process with the least to do."""

    def make(number: int) -> nn.Module:
        width = 20_000 if number == 3 else 4
        return nn.Sequential(nn.Linear(3, width), Waiting(0.2 if number == 3 else 0.0), nn.Linear(width, 2))

    number = {"space": lambda trial: {"number": trial.number}}
    result = search(make, **number, metric=process, trials=4, epochs=2, rows=4)
    last = [trial.value for trial in result.trials]
    assert last.count(last[3]) == 1


class _Odd(Exception):
    pass


def test_errors_come_back_as_they_are() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if os.getpid() != HERE:
            raise _Odd("over there")
        return F.cross_entropy(output, target)

    with pytest.raises(_Odd, match="over there") as caught:
        search(loss=loss)
    assert "in loss" in "".join(caught.value.__notes__)


def test_nothing_stays_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SweepWorkers, "first", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search()


def test_a_worker_that_the_system_kills_is_an_error() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(output, target)

    with pytest.raises(HFusionError, match=r"ended with exit code -9.*with fewer rows, or with processes=0"):
        search(loss=loss)


# How many trials train at a time by default: as many as the sampler and the pruner learn from.

TRIALS = 20


class Own(samplers.BaseSampler):
    """A sampler of a user, of which nothing is known."""

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, name, distribution):
        return distribution.low


def running(sampler, pruner, **options):
    """Return the number of running trials each time that a trial is asked for, itself included."""
    study, counts = optuna.create_study(sampler=sampler, pruner=pruner), []

    def space(trial):
        states = [other.state for other in study.get_trials(deepcopy=False)]
        counts.append(states.count(optuna.trial.TrialState.RUNNING))
        return {"lr": trial.suggest_float("lr", 0.001, 0.2), "momentum": trial.suggest_float("momentum", 0.0, 0.9)}

    options = {"trials": TRIALS, "epochs": 2, "processes": 0, **options}
    sweep(study=study, space=space, optimizer=hf.optim.SGD, **options)
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

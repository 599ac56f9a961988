"""Plain trials in other processes: which trials move there, what they return, and that no process remains."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.errors import HFusionError
from hfusion.device.forked_process import why_no_fork
from hfusion.device.openmp import torch_threads
from hfusion.tune.parallel_trials import TrialSpread
from tests.tune.cases import MACHINE

pytest.importorskip("optuna")

HERE = os.getpid()


@pytest.fixture(autouse=True)
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if why_no_fork(torch.device("cpu")):
        pytest.skip("no fork of this process could train")
    monkeypatch.setattr("hfusion.tune.shape_array.seconds_saved", lambda choice: -math.inf)
    monkeypatch.setattr("hfusion.tune.parallel_trials.start_seconds", lambda: 0.0)
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
    return hf.sweep(
        make_model,
        lambda trial: {"lr": trial.suggest_float("lr", 0.01, 0.1)},
        options.pop("loss", F.cross_entropy),
        data,
        **{"trials": 6, "epochs": 3, "machine": MACHINE, "processes": 2, "rows": 6, **options},
    )


def where(result: hf.SweepResult) -> list[set[float]]:
    """The processes in which each trial was evaluated."""
    return [set(trial.intermediate_values.values()) for trial in result.trials]


def test_trials_are_in_as_many_processes_as_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrialSpread, "_judge", lambda *args: None)
    places = where(search(metric=process, pruner=unpruned()))
    # The first epoch of the first trial is measured here.
    assert HERE in places[0]
    assert len(set.union(*places) - {HERE}) == 2
    assert all(HERE not in trial for trial in places[1:])


def unpruned() -> Any:
    import optuna

    return optuna.pruners.NopPruner()


def test_none_where_none_were_given() -> None:
    assert set.union(*where(search(metric=process, pruner=unpruned(), processes=0))) == {HERE}


def test_models_that_cannot_be_pickled_stay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hfusion"):
        assert set.union(*where(search(Unpicklable, metric=process, pruner=unpruned()))) == {HERE}
    assert "trial 1 stays in this process, as pickle fails" in caplog.text


def test_trials_that_share_a_tensor_stay() -> None:
    frozen = nn.Linear(3, 3).requires_grad_(False)
    widths = iter([4, 5, 6, 7, 8, 9])

    def make() -> nn.Module:
        width = next(widths)
        return nn.Sequential(frozen, nn.Linear(3, width), nn.Linear(width, 2))

    assert set.union(*where(search(make, metric=process, pruner=unpruned()))) == {HERE}


@pytest.fixture
def slower_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = TrialSpread._judge

    def slower(spread: TrialSpread, elsewhere: Any) -> None:
        spread._local_seconds = dict.fromkeys(spread._local_seconds, 1e-9)
        judge(spread, elsewhere)

    monkeypatch.setattr(TrialSpread, "_judge", slower)


@pytest.mark.usefixtures("slower_workers")
def test_workers_that_are_slower_end() -> None:
    # The first trial is elsewhere in its second epoch, and is compared with its first.
    assert all(HERE in trial and len(trial) > 1 for trial in where(search(metric=process, pruner=unpruned())))


def threads(outputs: Tensor, target: Tensor) -> float:
    return float(torch.get_num_threads())


@pytest.mark.usefixtures("slower_workers")
def test_trials_keep_one_thread_where_workers_end() -> None:
    """Ending slower workers depends on measured times, so it must not change the threads, which affect rounding."""
    with torch_threads(2):
        result = search(metric=threads, pruner=unpruned())
    assert [set(trial.intermediate_values.values()) for trial in result.trials] == [{1.0}] * 6


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

    monkeypatch.setattr(TrialSpread, "_judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search()


def test_a_worker_that_the_system_kills_is_an_error() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(output, target)

    with pytest.raises(HFusionError, match=r"ended with exit code -9.*with fewer rows, or with processes=0"):
        search(loss=loss)


def test_processes_are_a_number() -> None:
    with pytest.raises(ValueError, match="processes=-1: give a whole number of at least 0, or None"):
        search(processes=-1)

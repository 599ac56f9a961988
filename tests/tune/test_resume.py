"""A sweep that is killed anywhere, and resumed, ends with the trials, states and best model of one that was not."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

import hfusion as hf

optuna = pytest.importorskip("optuna")
from tests.tune import killed  # noqa: E402
from tests.tune.cases import loaders, sweep  # noqa: E402
from tests.tune.killed import at, everything, run  # noqa: E402

ROOT = Path(__file__).parents[2]


class Killed(BaseException):
    """Stands for the end of the process: a sweep with a folder does not catch it."""


def kill() -> None:
    raise Killed


def nothing(event: str) -> None:
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of sweeps that are not killed, by sampler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hfusion.tune.trial_placement.seconds_saved", lambda *args: math.inf)
        return {name: everything(run(str(tmp_path_factory.mktemp(name)), nothing, name)) for name in killed.samplers()}


@pytest.mark.parametrize(
    ("sampler", "kills"),
    [
        ("random", [("asked", 1), ("suggested", 1), ("asked", 7), ("suggested", 7)]),
        ("tpe", [("suggested", 5), ("judged", 4), ("reported", 1), ("kept", 1)]),
        ("tpe", [("pruned", 1), ("pruned", 2), ("pruned", 3), ("reported", 8)]),
        ("tpe", [("suggested", 9), ("reported", 9), ("kept", 8), ("pruned", 2)]),
    ],
)
def test_killed_again_and_again(
    sampler: str, kills: list[tuple[str, int]], whole: dict[str, list[Any]], tmp_path: Path
) -> None:
    killed_times = 0
    for event, count in kills:
        try:
            run(str(tmp_path), at(event, count, kill), sampler)
        except Killed:
            killed_times += 1
    assert killed_times >= 3
    assert everything(run(str(tmp_path), nothing, sampler)) == whole[sampler]


S = optuna.samplers
SAMPLERS: dict[str, Callable[[], Any]] = {
    "qmc": lambda: S.QMCSampler(seed=3, warn_independent_sampling=False),
    "gp": lambda: S.GPSampler(seed=3, n_startup_trials=3),
    "cma": lambda: S.CmaEsSampler(seed=3, n_startup_trials=2, popsize=4, with_margin=True),
    "tpe": lambda: S.TPESampler(seed=3, n_startup_trials=3, multivariate=True, constant_liar=True),
    "brute force": lambda: S.BruteForceSampler(seed=1),
}
MODES: dict[str, dict[str, Any]] = {
    "together": {"pruner": optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)},
    "asynchronous": {"rounds": "asynchronous", "pruner": optuna.pruners.NopPruner()},
    "pbt": {"pbt": hf.PBT(quantile_fraction=0.5)},
}


def sampled(folder: Path, sampler: str, mode: str) -> list[Any]:
    def space(trial: Any) -> dict[str, Any]:
        rate = trial.suggest_float("lr", 0.05, 0.3, step=0.05)
        momentum = trial.suggest_float("momentum", 0.1, 0.9, step=0.1)
        if trial.number == 5:
            raise optuna.TrialPruned
        return {"lr": rate, "momentum": momentum, "hidden": 3 + trial.number % 2}

    arguments = {"trials": 10, "rows": 4, "epochs": 2, "processes": 0, **MODES[mode]}
    arguments |= {"loader": loaders()["eval_loader"], "eval_loader": None, "sampler": SAMPLERS[sampler]()}
    result = sweep(**arguments, space=space, optimizer=hf.optim.SGD, directory=folder)
    trials = [(trial.number, trial.params, trial.state.name, trial.values) for trial in result.trials]
    return [trials, result.best_trial.number, list(result.best_models)]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(
    ("sampler", "mode"), [*((name, "together") for name in SAMPLERS), *(("qmc", m) for m in MODES)]
)
def test_killed_at_a_write_to_the_study(
    sampler: str, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also between two values of a trial, and between a sampler's notes and the values that it then gives."""
    backend = optuna.storages.journal.JournalFileBackend
    write, writes, last = backend.append_logs, [0], [0]

    def append_logs(self: Any, logs: Any) -> None:
        writes[0] += 1
        if writes[0] == last[0]:
            raise Killed
        write(self, logs)

    monkeypatch.setattr(backend, "append_logs", append_logs)
    expected = sampled(tmp_path / "whole", sampler, mode)
    draw, total = random.Random(0), writes[0]
    for attempt in range(2):
        for _ in range(3):
            writes[0], last[0] = 0, draw.randint(2, total // 2)
            with contextlib.suppress(Killed):
                sampled(tmp_path / str(attempt), sampler, mode)
        last[0] = 0
        assert sampled(tmp_path / str(attempt), sampler, mode) == expected


def test_a_process_that_is_killed(whole: dict[str, list[Any]], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.tune.killed", str(tmp_path), "kept", "8"]
    environment = {**os.environ, "HFUSION_RATES": "standard"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert everything(run(str(tmp_path), nothing)) == whole["tpe"]


def test_after_the_end_there_is_nothing_to_do_until_more_is_asked(tmp_path: Path) -> None:
    run(str(tmp_path), nothing, trials=3)
    again = run(str(tmp_path), at("judged", 1, kill), trials=3)
    assert len(again.trials) == 3
    assert len(run(str(tmp_path), nothing, trials=4).trials) == 4


def test_resuming_another_sweep_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(str(tmp_path), at("judged", 1, kill))
    others = {"seed": 1, "optimizer": hf.optim.SGD, "loss": F.l1_loss, "metric": len, "scheduler": len, "accumulate": 9}
    for name, other in others.items():
        with pytest.raises(
            hf.CheckpointError, match=f"{name} was .* when the sweep was saved, and is .*: give what it"
        ):
            run(str(tmp_path), nothing, **{name: other})
    with pytest.raises(hf.CheckpointError, match="trial 0 of the sweep that was saved is not in study 'other': give"):
        run(str(tmp_path), nothing, study="other")
    with pytest.raises(ValueError, match=r"keeps its study in a journal there.* Leave out study and storage"):
        run(str(tmp_path), nothing, storage=f"sqlite:///{tmp_path}/other.db")
    os.truncate(tmp_path / "study.journal", 100)
    with pytest.raises(hf.CheckpointError, match=r"study\.journal is shorter than when the sweep was saved"):
        run(str(tmp_path), nothing)


def test_what_others_add_to_the_study_of_a_finished_sweep_stays(tmp_path: Path) -> None:
    run(str(tmp_path), nothing, trials=3)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.journal"))
    study = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))
    study.enqueue_trial({"lr": 0.123, "hidden": 4})
    assert run(str(tmp_path), nothing, trials=4).trials[3].params == {"lr": 0.123, "hidden": 4}

"""Arrays that report when they are ready: values as alone, decisions the pruner's in that order, whatever is killed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hfusion as hf
from tests.cluster.temporary_files import nothing_left, shared_memory, use_temporary
from tests.tune import cases
from tests.tune.cases import MACHINE, alone
from tests.tune.killed import at, everything, run
from tests.tune.test_resume import Killed, kill, nothing
from tests.tune.test_sweep import Recorded, decided_anew

optuna = pytest.importorskip("optuna")
ROOT = Path(__file__).parents[2]
LONG = pytest.mark.cluster


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files of this process and of the processes that it starts."""
    return use_temporary(tmp_path / "temporary", monkeypatch)


def halving() -> Any:
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)


def processes(count: int, **options: Any) -> hf.Cluster:
    pytest.importorskip("cloudpickle")
    return hf.Cluster(hf.Machine([hf.Device(f"cpu:{n}", memory="1GiB") for n in range(count)], "1GiB"), **options)


def search(machine: hf.Machine | hf.Cluster, pruner: Any, **options: Any) -> hf.SweepResult:
    defaults = {"trials": 14, "rows": 6, "rounds": "asynchronous"}
    return cases.sweep(**{**defaults, "machine": machine, "pruner": pruner, **options})


def assert_as_alone(result: hf.SweepResult) -> None:
    for trial in result.trials:
        expected = alone(trial.params, trial.number, trial.user_attrs["hfusion:round"], len(trial.intermediate_values))
        assert list(trial.intermediate_values.values()) == pytest.approx([loss for _, loss, _ in expected], rel=1e-9)


def test_values_are_those_of_trials_alone_and_decisions_those_of_the_pruner(tmp_path: Path) -> None:
    recorded = Recorded(halving())
    result = search(MACHINE, recorded, directory=tmp_path / "sweep")
    assert_as_alone(result)
    assert decided_anew(result, recorded.said, halving()) == recorded.said
    assert {trial.state.name for trial in result.trials} == {"COMPLETE", "PRUNED"}
    # Arrays take turns, and report alone: a trial is in a later epoch than one that began with it.
    steps = [step for _, step, _ in recorded.said]
    assert steps != sorted(steps)


@pytest.mark.parametrize(
    "kills",
    [
        [("suggested", 5), ("judged", 4), ("reported", 1), ("kept", 1)],
        [("pruned", 1), ("reported", 8), ("pruned", 2), ("asked", 2)],
    ],
)
def test_killed_again_and_again(kills: list[tuple[str, int]], tmp_path: Path) -> None:
    """On one device the order does not depend on time, so that all must be equal to the bit."""
    whole, killed_times = everything(run(str(tmp_path / "whole"), nothing, rounds="asynchronous")), 0
    for event, count in kills:
        try:
            run(str(tmp_path / "killed"), at(event, count, kill), rounds="asynchronous")
        except Killed:
            killed_times += 1
    assert killed_times >= 3
    assert everything(run(str(tmp_path / "killed"), nothing, rounds="asynchronous")) == whole


class Deadly:
    """A metric that kills a process, once, at the ``at``-th judgement there."""

    def __init__(self, folder: Path, at: float = math.inf) -> None:
        self.driver, self.folder, self.at, self.count = os.getpid(), folder, at, 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mark, self.count = self.folder / "mark", self.count + 1
        if os.getpid() != self.driver and self.count == self.at and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(output, target)


@pytest.mark.parametrize(("at", "saved"), [(math.inf, True), pytest.param(4, True, marks=LONG)])
def test_two_processes(at: float, saved: bool, tmp_path: Path, temporary: Path) -> None:
    before, folder = shared_memory(), tmp_path / "sweep"
    result = search(processes(2, max_failures=1), halving(), metric=Deadly(tmp_path, at), directory=folder)
    assert (tmp_path / "mark").exists() == (at < math.inf)
    assert_as_alone(result)
    assert nothing_left(temporary, before)


@LONG
@pytest.mark.parametrize("count", [3, 9, 17])
def test_a_driver_that_is_killed(count: int, tmp_path: Path) -> None:
    """Its processes go with it."""
    folder = tmp_path / "sweep"
    command = [sys.executable, "-W", "ignore", "-m", "tests.tune.test_asynchronous", str(folder), str(count)]
    environment: Mapping[str, str] = {**os.environ, "HFUSION_RATES": "standard"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    result = search(processes(2), halving(), directory=folder)
    assert_as_alone(result)


class DeadlyPruner(Recorded):
    """Ends its process with the ``count``-th decision."""

    count = 0

    def prune(self, study: Any, trial: Any) -> bool:
        decision = super().prune(study, trial)
        if len(self.said) == self.count:
            os.kill(os.getpid(), signal.SIGKILL)
        return decision


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = DeadlyPruner(halving())
    pruner.count = int(sys.argv[2])
    search(processes(2), pruner, directory=Path(sys.argv[1]))

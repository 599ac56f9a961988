"""Arrays that report when they are ready: values as alone, decisions the pruner's in that order, whatever is killed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hfusion as hf
from hfusion.tune.asynchronous_runner import ORDER, AsynchronousSweepRunner, ReportOrder
from tests.cluster.temporary_files import nothing_left, shared_memory, use_temporary
from tests.tune.cases import EPOCHS, MACHINE, alone, loaders, make_model, space
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
    arguments = {"trials": 14, "rows": 6, "space": space, **loaders(), **options}
    return hf.sweep(
        make_model,
        arguments.pop("space"),
        F.cross_entropy,
        epochs=EPOCHS,
        sampler=optuna.samplers.RandomSampler(seed=3),
        pruner=pruner,
        machine=machine,
        rounds="asynchronous",
        **arguments,
    )


def reported(result: hf.SweepResult, folder: Path) -> list[tuple[int, int]]:
    """The trial and the step of each report, in the recorded order."""
    steps: Counter[int] = Counter()
    reports = []
    for line in (folder / ORDER).read_text().splitlines():
        for number in map(int, line.split()[1:]):
            reports.append((number, steps[number]))
            steps[number] += 1
    assert steps == {trial.number: len(trial.intermediate_values) for trial in result.trials}
    return reports


def assert_as_alone(result: hf.SweepResult) -> None:
    for trial in result.trials:
        expected = alone(trial.params, trial.number, trial.user_attrs["hfusion:round"], len(trial.intermediate_values))
        assert list(trial.intermediate_values.values()) == pytest.approx([loss for _, loss, _ in expected], rel=1e-9)


def assert_decided(result: hf.SweepResult, folder: Path) -> None:
    """Check that the pruner comes to the same states if it gets the same values in the recorded order."""
    order = [(*report, False) for report in reported(result, folder)]
    decisions = decided_anew(result, order, halving())
    assert [decision[:2] for decision in decisions if decision[2]] == [
        (trial.number, trial.last_step)
        for trial in sorted(result.trials, key=lambda trial: order.index((trial.number, trial.last_step, False)))
        if trial.state.name == "PRUNED"
    ]


def test_values_are_those_of_trials_alone_and_decisions_those_of_the_pruner(tmp_path: Path) -> None:
    recorded = Recorded(halving())
    result = search(MACHINE, recorded, directory=tmp_path / "sweep")
    assert_as_alone(result)
    assert [decision[:2] for decision in recorded.said] == reported(result, tmp_path / "sweep")
    assert decided_anew(result, recorded.said, halving()) == recorded.said
    assert {trial.state.name for trial in result.trials} == {"COMPLETE", "PRUNED"}
    # Arrays take turns, and report alone.
    assert len({line.split()[0] for line in (tmp_path / f"sweep/{ORDER}").read_text().splitlines()}) > 2


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
    assert (tmp_path / f"killed/{ORDER}").read_text() == (tmp_path / f"whole/{ORDER}").read_text()


def test_an_order_that_was_begun_is_kept_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the array reported that was ready first, and resumed where another one is ready first."""

    def other_first(runner: Any, body: Any, tensors: Any) -> None:
        resume(runner, body, tensors)
        assert len(runner.placement.arrays) == 2
        runner.placement.arrays.reverse()

    resume = AsynchronousSweepRunner.resume
    with pytest.raises(Killed):
        run(str(tmp_path), at("reported", 2, kill), rounds="asynchronous")
    begun = (tmp_path / ORDER).read_text().splitlines()[0]
    monkeypatch.setattr(AsynchronousSweepRunner, "resume", other_first)
    result = run(str(tmp_path), nothing, rounds="asynchronous")
    names = [line.split()[0] for line in (tmp_path / ORDER).read_text().splitlines()]
    assert begun.split()[0] == "array-0"
    assert names[:3] == ["array-0", "array-1", "array-1"]
    assert_decided(result, tmp_path)


def test_lines_that_are_not_whole_and_arrays_that_are_gone(tmp_path: Path) -> None:
    order = ReportOrder(tmp_path, 0)
    order.note("array-0", [3, 4])
    order.note("array-1", [5])
    with (tmp_path / ORDER).open("a") as file:
        file.write("array-0 3")
    again = ReportOrder(tmp_path, 1)
    assert list(again.replayed) == ["array-1"]
    again.note("array-1", [5])
    again.note("array-2", [6, 7])
    assert (tmp_path / ORDER).read_text() == "array-0 3 4\narray-1 5\narray-2 6 7\n"
    late = ReportOrder(tmp_path, 0)
    late.skip_missing(["array-2"])
    assert (list(late.replayed), late.count) == (["array-2"], 2)


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
    assert_decided(result, folder)
    assert nothing_left(temporary, before)


@LONG
@pytest.mark.parametrize("count", [3, 9, 17])
def test_a_driver_that_is_killed(count: int, tmp_path: Path) -> None:
    """Its processes go with it; what it had begun to decide is decided so, and what comes after is the pruner's."""
    folder = tmp_path / "sweep"
    command = [sys.executable, "-W", "ignore", "-m", "tests.tune.test_asynchronous", str(folder), str(count)]
    environment: Mapping[str, str] = {**os.environ, "HFUSION_RATES": "standard"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    begun = (folder / ORDER).read_text()
    result = search(processes(2), halving(), directory=folder)
    assert (folder / ORDER).read_text().startswith(begun)
    assert_as_alone(result)
    assert_decided(result, folder)


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

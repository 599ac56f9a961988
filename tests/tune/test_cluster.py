"""A sweep on the devices of a cluster gives what one machine gives, whatever is killed, and leaves nothing behind."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hfusion as hf
from hfusion.core.event_log import read_events
from tests.cluster.temporary_files import nothing_left, shared_memory, use_temporary
from tests.tune import cases
from tests.tune.cases import MACHINE, accuracy, alone, space

optuna = pytest.importorskip("optuna")
pytest.importorskip("cloudpickle")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files of this process and of the processes that it starts."""
    return use_temporary(tmp_path / "temporary", monkeypatch)


def processes(count: int, **options: Any) -> hf.Cluster:
    return hf.Cluster(hf.Machine([hf.Device(f"cpu:{n}", memory="1GiB") for n in range(count)], "1GiB"), **options)


class Judge:
    """A metric that kills its process at the ``at``-th judgement there, but not the driver, nor a second time."""

    def __init__(self, at: int, mark: Path) -> None:
        self.driver, self.at, self.mark, self.count = os.getpid(), at, mark, 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.driver:
            self.count += 1
            if self.count == self.at and not self.mark.exists():
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return accuracy(output, target)


def sweep(machine: hf.Machine | hf.Cluster, **options: Any) -> hf.SweepResult:
    sampler = optuna.samplers.TPESampler(seed=3, n_startup_trials=4)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    arguments = {"machine": machine, "sampler": sampler, "pruner": pruner, "direction": "maximize"}
    return cases.sweep(**{**arguments, "rows": 8, "metric": accuracy, **options})


def assert_same_sweep(actual: hf.SweepResult, expected: hf.SweepResult) -> None:
    """States and suggestions to the bit; values as alone, as they are of arrays of other widths."""
    assert [trial.state for trial in actual.trials] == [trial.state for trial in expected.trials]
    assert [trial.params for trial in actual.trials] == [trial.params for trial in expected.trials]
    for trial, other in zip(actual.trials, expected.trials, strict=True):
        assert trial.intermediate_values == pytest.approx(other.intermediate_values, rel=1e-9)
        assert trial.user_attrs["hfusion:round"] == other.user_attrs["hfusion:round"]
        assert trial.user_attrs.get("hfusion:copies") == other.user_attrs.get("hfusion:copies")
    assert actual.best_trial.number == expected.best_trial.number
    for key, value in expected.best_model.state_dict().items():
        torch.testing.assert_close(actual.best_model.state_dict()[key], value, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def whole() -> hf.SweepResult:
    """On one machine; its trials are those of test_sweep, which are compared with trials alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hfusion.tune.trial_placement.seconds_saved", lambda *args: math.inf)
        result = sweep(MACHINE)
    assert {trial.state.name for trial in result.trials} == {"COMPLETE", "PRUNED"}
    return result


def test_two_processes_give_what_one_machine_gives(whole: hf.SweepResult, temporary: Path) -> None:
    before = shared_memory()
    result = sweep(processes(2))
    assert_same_sweep(result, whole)
    assert nothing_left(temporary, before)
    for trial in result.trials:
        expected = alone(trial.params, trial.number, trial.user_attrs["hfusion:round"], len(trial.intermediate_values))
        assert list(trial.intermediate_values.values()) == pytest.approx([value for *_, value in expected], rel=1e-9)


def test_who_is_killed_loses_no_trial(whole: hf.SweepResult, tmp_path: Path, temporary: Path) -> None:
    before = shared_memory()
    metric = Judge(3, tmp_path / "mark")
    result = sweep(processes(2, max_failures=1), metric=metric, directory=tmp_path / "sweep")
    assert (tmp_path / "mark").exists()
    assert_same_sweep(result, whole)
    assert nothing_left(temporary, before)
    for trial in result.trials:
        events = read_events(tmp_path / f"sweep/logs/trials/{trial.number}.log")
        values = [event.values["value"] for event in events if "value" in event.values]
        assert values == [f"{value:.6g}" for value in trial.intermediate_values.values()], "each once"


def raises(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise ValueError("the metric is gone")


def test_errors_of_the_processes_are_raised_here(temporary: Path) -> None:
    before, study = shared_memory(), optuna.create_study()
    with pytest.raises(ValueError, match="the metric is gone") as caught:
        cases.sweep(metric=raises, study=study, trials=2, epochs=1, machine=processes(1))
    assert any("in the process of" in note for note in caught.value.__notes__)
    assert {trial.state.name for trial in study.trials} == {"FAIL"}
    assert nothing_left(temporary, before)


def interrupting(space: Callable[[Any], Any], at: int) -> Callable[[Any], Any]:
    def interrupting_space(trial: Any) -> Any:
        if trial.number == at:
            os.kill(os.getpid(), signal.SIGINT)
        return space(trial)

    return interrupting_space


# `hf.sweep` on a machine with several devices: the trials of one device, in a process for each.

pytest.importorskip("optuna")
pytest.importorskip("cloudpickle")
ONE = hf.Machine([hf.Device("cpu", memory="1GiB")], "1GiB")
TWO = hf.Machine([hf.Device(f"cpu:{n}", memory="1GiB") for n in range(2)], "1GiB")


def test_all_devices_train_what_one_does(tmp_path: Path) -> None:
    """Also where the sweep was interrupted, and goes on."""
    expected = sweep(ONE)
    assert expected.processes == 1
    folder = tmp_path / "sweep"
    with pytest.raises(KeyboardInterrupt):
        sweep(TWO, directory=folder, space=interrupting(space, 10))
    result = sweep(TWO, directory=folder)
    assert_same_sweep(result, expected)
    assert result.processes == 2
    assert type(result.best_model) is type(expected.best_model)

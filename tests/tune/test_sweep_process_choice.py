"""`hf.sweep` on a machine with several devices: the trials of one device, in a process for each where that pays."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from tests.cluster.temporary_files import emptied_temporary
from tests.tune.cases import accuracy, loaders, make_model, space
from tests.tune.test_cluster import assert_same_sweep, interrupting, sweep

pytest.importorskip("optuna")
pytest.importorskip("cloudpickle")
LONG = pytest.mark.cluster
ONE = hf.Machine([hf.Device("cpu", memory="1GiB")], "1GiB")
TWO = hf.Machine([hf.Device(f"cpu:{n}", memory="1GiB") for n in range(2)], "1GiB")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files; no process and no file is left in the end."""
    yield from emptied_temporary(tmp_path / "temporary", monkeypatch)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes begin at once, so that they pay in short sweeps."""
    monkeypatch.setattr("hfusion.tune.sweep_process_choice.begin_seconds", lambda machine: 0.0)
    monkeypatch.setattr("hfusion.tune.sweep_process_choice.devices_at_once", lambda count, rates, threads: count)


def test_all_devices_train_what_one_does(at_once: None, tmp_path: Path) -> None:
    """Also where the sweep was interrupted, and goes on."""
    expected = sweep(ONE)
    assert expected.processes is None
    folder = tmp_path / "sweep"
    with pytest.raises(KeyboardInterrupt):
        sweep(TWO, directory=folder, space=interrupting(space, 10))
    result = sweep(TWO, directory=folder)
    assert_same_sweep(result, expected)
    assert str(result.processes) == "2 processes, one for each device: as the sweep that goes on began"
    assert type(result.best_model) is type(expected.best_model)


def test_a_short_sweep_is_on_the_largest_device() -> None:
    result = sweep(TWO, trials=2)
    assert result.processes is not None
    assert "one process for all devices: 2 trials of 4 epochs take an estimated" in str(result.processes)


def small(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1)}


SHARED, LOCK = loaders()["loader"], threading.Lock()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"callbacks": [lambda study, trial: SHARED.batch_size]},
            "callbacks reach an object of class DataLoader that the training uses",
        ),
        ({"pbt": hf.PBT()}, "pbt compares the trials of a shape"),
        ({"metric": lambda output, target, lock=LOCK: output.mean()}, "pickle fails"),
    ],
    ids=["its own loader", "pbt", "a lock"],
)
def test_reasons_for_one_process(options: dict[str, Any], reason: str, at_once: None) -> None:
    arguments = {**loaders(), "loader": SHARED, "trials": 2, "epochs": 1, **options}
    result = hf.sweep(make_model, small, F.cross_entropy, **arguments, machine=TWO)
    assert result.processes is not None
    assert result.processes.count == 1
    assert reason in result.processes.reason


def test_an_error_of_the_space_is_that_of_a_sweep(at_once: None) -> None:
    def space(trial: Any) -> dict[str, Any]:
        raise ZeroDivisionError("no space")

    with pytest.raises(ZeroDivisionError, match="no space"):
        hf.sweep(make_model, space, F.cross_entropy, **loaders(), trials=2, epochs=1, machine=TWO)


class Home(nn.Module):
    """Computes in the process of this number alone."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self.linear, self.home = nn.Linear(6, 2).double(), process

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.home:
            raise RuntimeError("not at home")
        output: torch.Tensor = self.linear(x)
        return output


def test_what_fails_elsewhere_is_trained_here(at_once: None) -> None:
    process = os.getpid()
    with pytest.warns(UserWarning, match="hf.sweep goes on in one process, as .*not at home"):
        result = hf.sweep(
            lambda: Home(process), small, F.cross_entropy, **loaders(), metric=accuracy, trials=2, epochs=1, machine=TWO
        )
    assert result.processes is not None
    assert result.processes.count == 1
    assert len(result.trials) == 2

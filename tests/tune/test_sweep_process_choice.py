"""`hf.sweep` on a machine with several devices: the trials of one device, in a process for each where that pays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

import hfusion as hf
from tests.cluster.temporary_files import emptied_temporary
from tests.tune.cases import loaders, make_model, space
from tests.tune.test_cluster import assert_same_sweep, interrupting, sweep

pytest.importorskip("optuna")
pytest.importorskip("cloudpickle")
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


def test_an_error_of_the_space_is_that_of_a_sweep(at_once: None) -> None:
    def space(trial: Any) -> dict[str, Any]:
        raise ZeroDivisionError("no space")

    with pytest.raises(ZeroDivisionError, match="no space"):
        hf.sweep(make_model, space, F.cross_entropy, **loaders(), trials=2, epochs=1, machine=TWO)

"""`hf.sweep` on a machine with several devices: the trials of one device, in a process for each."""

from __future__ import annotations

import threading
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


def test_all_devices_train_what_one_does(tmp_path: Path) -> None:
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


def small(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1)}


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"trials": 3}, "3 trials are fewer than two for each of 2 devices"),
        ({"trials": 8, "pbt": hf.PBT()}, "pbt compares the trials of a shape"),
        ({"trials": 8, "processes": 0}, "processes=0"),
    ],
)
def test_reasons_for_one_process(options: dict[str, Any], reason: str) -> None:
    result = hf.sweep(make_model, small, F.cross_entropy, **loaders(), epochs=1, **options, machine=TWO)
    assert result.processes is not None
    assert result.processes.count == 1
    assert reason in result.processes.reason


def test_what_cannot_be_sent_is_trained_here() -> None:
    with pytest.warns(UserWarning, match="hf.sweep goes on in one process, as .*pickle fails"):
        result = hf.sweep(
            make_model,
            small,
            F.cross_entropy,
            **loaders(),
            metric=lambda output, target, lock=LOCK: output.mean(),
            trials=4,
            epochs=1,
            machine=TWO,
        )
    assert result.processes is not None
    assert result.processes.count == 1

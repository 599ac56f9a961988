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
    assert expected.processes == 1
    folder = tmp_path / "sweep"
    with pytest.raises(KeyboardInterrupt):
        sweep(TWO, directory=folder, space=interrupting(space, 10))
    result = sweep(TWO, directory=folder)
    assert_same_sweep(result, expected)
    assert result.processes == 2
    assert type(result.best_model) is type(expected.best_model)


def small(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1)}


LOCK = threading.Lock()


@pytest.mark.parametrize("options", [{"trials": 3}, {"trials": 8, "pbt": hf.PBT()}, {"trials": 8, "processes": 0}])
def test_one_process_for_few_trials_and_for_copies(options: dict[str, Any]) -> None:
    assert hf.sweep(make_model, small, F.cross_entropy, **loaders(), epochs=1, **options, machine=TWO).processes == 1


def test_what_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(hf.PlanError, match="what the sweep trains with cannot go to another process, as pickle fails"):
        hf.sweep(
            make_model,
            small,
            F.cross_entropy,
            **loaders(),
            metric=lambda output, target, lock=LOCK: output.mean(),
            trials=4,
            epochs=1,
            machine=TWO,
        )

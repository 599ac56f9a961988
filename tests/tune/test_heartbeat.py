"""What a sweep that died has left in training is told FAIL by the next one; what others have is theirs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

import hfusion as hf
from hfusion.tune.heartbeat import Heartbeat, dead_runs
from tests.tune.cases import MACHINE, loaders, make_model

optuna = pytest.importorskip("optuna")


def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def left(study: Any, run: str | None, **beat: Any) -> int:
    """A trial that is in training, of a sweep with such a sign of life."""
    trial = study.ask()
    if run is not None:
        trial.set_user_attr("hfusion:run", run)
        known = {"host": socket.gethostname(), "process": os.getpid(), "directory": None, "until": time.time() + 60}
        study.set_user_attr(f"hfusion:sweep:{run}", {**known, **beat})
    return int(trial.number)


def test_what_died_is_buried(tmp_path: Path) -> None:
    study = optuna.create_study()
    process = gone()
    dead = [
        left(study, "gone", process=process),
        left(study, "far", host="elsewhere", process=1, until=time.time() - 1),
    ]
    others = [
        left(study, None),
        left(study, "alive"),
        left(study, "far and alive", host="elsewhere", process=process),
        left(study, "comes back", process=process, directory=str(tmp_path)),
    ]
    assert dead_runs(study) == {"gone", "far"}
    result = hf.sweep(
        make_model, lambda trial: {}, F.cross_entropy, study=study, trials=1, epochs=1, machine=MACHINE, **loaders()
    )
    states = {one.number: one.state.name for one in study.trials}
    assert [states[number] for number in dead] == ["FAIL"] * 2
    assert [states[number] for number in others] == ["RUNNING"] * 4
    assert [one.state.name for one in result.trials] == ["COMPLETE"]
    assert dead_runs(study) == {"gone", "far", result.trials[0].user_attrs["hfusion:run"]}


def test_signs_are_written_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    study, times = optuna.create_study(), [1000.0]
    monkeypatch.setattr(time, "time", lambda: times[-1])
    beats = Heartbeat(study, "a", None)
    found = []
    for seconds in (1010.0, 1029.0, 1031.0, 1400.0):
        times.append(seconds)
        beats.beat()
        found.append(study.user_attrs["hfusion:sweep:a"]["until"])
    assert found == [1600.0, 1600.0, 1631.0, 1400.0 + 3690.0]
    assert dead_runs(study) == set()
    beats.end()
    assert dead_runs(study) == {"a"}

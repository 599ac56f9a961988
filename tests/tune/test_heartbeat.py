"""A sweep marks running trials of dead sweeps as failed, and leaves those of other sweeps alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import torch.nn.functional as F

import hfusion as hf
from hfusion.tune.study import dead_runs
from tests.tune.cases import MACHINE, loaders, make_model

optuna = pytest.importorskip("optuna")


def ended_process() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def running_trial(study: Any, run: str | None, **beat: Any) -> int:
    """Start a trial of a sweep with this heartbeat, and return its number."""
    trial = study.ask()
    if run is not None:
        trial.set_user_attr("hfusion:run", run)
        defaults = {"host": socket.gethostname(), "process": os.getpid(), "until": time.time() + 60}
        study.set_user_attr(f"hfusion:sweep:{run}", {**defaults, **beat})
    return int(trial.number)


def test_trials_of_dead_sweeps_are_marked_failed() -> None:
    study = optuna.create_study()
    process = ended_process()
    dead = [
        running_trial(study, "gone", process=process),
        running_trial(study, "far", host="elsewhere", process=1, until=time.time() - 1),
    ]
    others = [
        running_trial(study, None),
        running_trial(study, "alive"),
        running_trial(study, "far and alive", host="elsewhere", process=process),
    ]
    assert dead_runs(study) == {"gone", "far"}
    result = hf.sweep(
        make_model, lambda trial: {}, F.cross_entropy, study=study, trials=1, epochs=1, machine=MACHINE, **loaders()
    )
    states = {trial.number: trial.state.name for trial in study.trials}
    assert [states[number] for number in dead] == ["FAIL"] * 2
    assert [states[number] for number in others] == ["RUNNING"] * 3
    assert [trial.state.name for trial in result.trials] == ["COMPLETE"]
    assert dead_runs(study) == {"gone", "far", result.trials[0].user_attrs["hfusion:run"]}

"""The example of a sweep at a small size: it learns, prints a table, and goes on from its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("optuna")
from examples import sweep


def test_it_learns_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = sweep.main(["--trials", "4", "--epochs", "2", "--directory", str(tmp_path)])
    assert result.best_value > 0.8
    images, labels = (torch.stack([torch.as_tensor(one[place]) for one in sweep.load()[1]]) for place in (0, 1))
    with torch.no_grad():
        output = result.best_model.eval()(images)
    assert float(sweep.accuracy(output, labels)) == result.best_value
    again = sweep.main(["--trials", "4", "--epochs", "2", "--directory", str(tmp_path)])
    assert [one.values for one in again.trials] == [one.values for one in result.trials]
    assert capsys.readouterr().out.count("sweep 'sweep'  4 trials") == 2


def test_processes_find_what_one_machine_finds() -> None:
    pytest.importorskip("cloudpickle")
    options = ["--trials", "6", "--epochs", "2", "--rows", "4"]
    one, two = sweep.main(options), sweep.main([*options, "--processes", "2"])
    assert [trial.params for trial in two.trials] == [trial.params for trial in one.trials]
    # In float32 arrays of other widths round otherwise.
    assert two.best_value == pytest.approx(one.best_value, abs=0.02)

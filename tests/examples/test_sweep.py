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
    images, labels = (torch.stack([torch.as_tensor(sample[index]) for sample in sweep.load()[1]]) for index in (0, 1))
    with torch.no_grad():
        output = result.best_model.eval()(images)
    assert float(sweep.accuracy(output, labels)) == result.best_value
    again = sweep.main(["--trials", "4", "--epochs", "2", "--directory", str(tmp_path)])
    assert [trial.values for trial in again.trials] == [trial.values for trial in result.trials]
    assert capsys.readouterr().out.count("sweep 'sweep'  4 trials") == 2


def test_processes_find_what_one_machine_finds() -> None:
    pytest.importorskip("cloudpickle")
    options = ["--trials", "6", "--epochs", "2", "--rows", "4"]
    single, multiple = sweep.main(options), sweep.main([*options, "--processes", "2"])
    assert [trial.params for trial in multiple.trials] == [trial.params for trial in single.trials]
    # In float32 arrays of other widths round otherwise.
    assert multiple.best_value == pytest.approx(single.best_value, abs=0.02)

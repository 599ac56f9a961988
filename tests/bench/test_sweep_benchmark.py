"""The sub-benchmark ``sweep``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("optuna")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
from hfusion.bench import sweep_benchmark
from hfusion.bench.__main__ import main
from hfusion.bench.sweep_contenders import CONTENDERS, configurations


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFUSION_RATES", "standard")
    monkeypatch.setattr("hfusion.bench.command_line.cores", lambda: 1)
    target = tmp_path / "bench.json"
    names = "one-by-one,threads,hfusion"
    options = ["--quick", "--contenders", names, "--trials", "3", "--plot", str(tmp_path / "bench.svg")]
    assert main(["sweep", *options, "--json", str(target)]) == 0
    assert all(name in (tmp_path / "bench.svg").read_text() for name in names.split(","))
    assert "hf.sweep" in capsys.readouterr().out
    rows = json.loads(target.read_text())["rows"]
    assert [row["contender"] for row in rows] == names.split(",")
    assert list(rows[0]) == ["case", "contender", "trials", "epochs", "best", "seconds", "speedup"]
    for row in rows:
        assert (row["case"], row["trials"]) == ("cnn", 3)
        assert 3 <= row["epochs"] <= 9
        assert 0 < row["best"] <= 1
        assert row["speedup"] == rows[0]["seconds"] / row["seconds"]


def test_options_of_other_commands_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["sweep", "--members", "4"], "--members does not belong to sweep"),
        (["fuse", "--trials", "4"], "--trials belongs to sweep, not to fuse"),
        (["sweep", "--contenders", "vmap"], "unknown contender 'vmap': choose from one-by-one"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


def test_all_contenders_get_the_same_configurations() -> None:
    assert configurations(5) == configurations(5)
    assert len({configuration["lr"] for configuration in configurations(5)}) == 5
    assert len({contender.name for contender in CONTENDERS}) == len(CONTENDERS)


@pytest.mark.parametrize("case", sweep_benchmark.CASES, ids=lambda case: case.name)
def test_every_case_can_be_learned_from(case: sweep_benchmark.SweepCase) -> None:
    data = case.data()
    values = list(sweep_benchmark.train(case, data, {"lr": 3e-3, "weight_decay": 1e-4}, 0, 2))
    _, counts = torch.unique(data.judge[1], return_counts=True)
    assert values[-1] > 1.5 * float(counts.max()) / len(data.judge[1])

"""The sub-benchmark ``train``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfusion.bench import train_benchmark
from hfusion.bench.__main__ import main


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_benchmark, "_SECONDS", 0.01)
    target = tmp_path / "bench.json"
    assert main(["train", "--quick", "--members", "2", "--json", str(target)]) == 0
    assert "train_step ms" in capsys.readouterr().out
    (row,) = json.loads(target.read_text())["rows"]
    assert (row["model"], row["members"]) == ("mlp-small", 2)
    assert row["ratio"] == pytest.approx(row["train_ms"] / row["step_ms"])
    assert row["first"] > 0
    assert row["again"] > 0

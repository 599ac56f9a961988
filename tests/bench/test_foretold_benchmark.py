"""The sub-benchmark ``foretold``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfusion.bench import foretold_benchmark
from hfusion.bench.__main__ import main


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    assert main(["foretold", "--quick", "--json", str(target)]) == 0
    assert "ran / said" in capsys.readouterr().out
    (row,) = json.loads(target.read_text())["rows"]
    assert (row["model"], row["members"], row["steps"]) == ("mlp-small", 4, foretold_benchmark.STEPS)
    assert row["ratio"] == row["ran"] / row["said"] > 0

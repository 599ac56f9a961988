"""The sub-benchmark ``cluster``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfusion.bench import cluster_benchmark
from hfusion.bench.__main__ import main
from hfusion.bench.simulated_executor import driver_cost

pytest.importorskip("cloudpickle")


def test_the_driver_hears_every_array_to_its_end() -> None:
    """Of each array but the last to end, the driver's time for all eight messages is measured."""
    cost = driver_cost(20, 50)
    assert cost.messages == 50 * 8 - 1
    assert cost.us_per_message > 0
    assert cost.us_per_tail_message > 0


@pytest.mark.parametrize("method", ["loop", "hf.train"])
def test_a_way_prints_its_seconds(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--way", method, "--tasks", "2"]) == 0
    assert float(capsys.readouterr().out) > 0


@pytest.mark.cluster
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    assert main(["cluster", "--quick", "--tasks", "2", "--json", str(target)]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert [row["what"] for row in rows[:-1]] == [f"2 tasks, {method}" for method in cluster_benchmark.WAYS]
    assert all(row["cpu_seconds"] > 0 for row in rows)
    assert rows[-1]["us_per_message"] > 0
    assert "x loop" in capsys.readouterr().out

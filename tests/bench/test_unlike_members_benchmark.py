from pathlib import Path

from hfusion.bench.__main__ import main
from hfusion.bench.unlike_members_benchmark import measure


def test_every_contender_is_measured() -> None:
    rows = measure(members=2, inputs=4, samples=3, steps=1, repeats=1)
    assert [row.contender for row in rows] == [
        "loop",
        "loop, a process for each core",
        "hf.Population, one process",
        "hf.Population",
    ]
    assert all(row.ms > 0 and row.speedup > 0 for row in rows)


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = ["unlike-members", "--members", "2", "--samples", "3", "--inputs", "4", "--steps", "1", "--repeats", "1"]
    assert main([*command, "--json", str(out)]) == 0
    assert "hf.Population, one process" in out.read_text()

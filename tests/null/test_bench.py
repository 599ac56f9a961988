"""The benchmark's commands run to their end on CUDA, without a call that a real device would refuse.

Their numbers mean nothing here: losses differ, as nothing is computed, and the commands say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.null.calls import REFUSED_CALLS

pytestmark = pytest.mark.null

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("fuse", "optim", "shard")
OK, WRONG_LOSSES = 0, 1


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the benchmark. Fails if one of its processes has made a call that is refused."""
    path = os.pathsep.join([str(Path(__file__).parent / "site"), str(ROOT)])
    environment = os.environ | {REFUSED_CALLS: str(folder), "PYTHONPATH": path}
    command = [sys.executable, "-m", "hfusion.bench", *arguments, "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    reports = [file.read_text() for file in folder.iterdir()]
    assert reports, output
    assert set(reports) == {""}, output
    return done


@pytest.mark.parametrize("benchmark", COMMANDS)
def test_commands_run_to_their_end(benchmark: str, tmp_path: Path) -> None:
    done = run(tmp_path, benchmark, "--quick")
    assert done.returncode in (OK, WRONG_LOSSES), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    # The last line of a table.
    assert "└" in done.stdout


def test_first_contact(tmp_path: Path) -> None:
    """And nothing is a fault but values, which are not compared."""
    calls = tmp_path / "calls"
    calls.mkdir()
    file = tmp_path / "contact.json"
    done = run(calls, "contact", "--quick", "--json", str(file))
    assert {row["status"] for row in json.loads(file.read_text())["rows"]} == {"not computed"}, done.stdout
    assert done.returncode == OK

"""`python -m hfusion status`: of runs that go on, have ended or were killed, and of other folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest
import torch

import hfusion as hf
from hfusion.__main__ import main
from hfusion.core.event_log import read_events, resuming
from hfusion.status import MemberStatus, RunStatus, read_status
from tests.running import tasks, train
from tests.tune.cases import MACHINE

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def waiting(kind: str, folder: Path, mark: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run in another process, which waits in a minibatch until the mark is removed."""
    environment = {**os.environ, "HFUSION_RATES": "standard", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.running", kind, str(folder), str(mark)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 120
            while not mark.exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield process
        finally:
            process.kill()


def status(folder: Path) -> RunStatus:
    (run,) = read_status(folder)
    return run


def only(folder: Path) -> tuple[RunStatus, MemberStatus]:
    run = status(folder)
    (member,) = run.members
    return run, member


def events(folder: Path, name: str = "arrays/lines") -> list[str]:
    return [event.event for event in read_events(folder / f"logs/{name}.log")]


def counts(member: MemberStatus) -> tuple[object, ...]:
    return member.state, *(member.values.get(key) for key in ("minibatch", "epoch", "members"))


def process_of(run: RunStatus) -> int:
    return int(run.values["process"])


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    report = train(tmp_path)
    run, member = only(tmp_path)
    assert (run.kind, run.state, process_of(run)) == ("train", "finished", os.getpid())
    assert counts(member) == ("finished", "20/20", "4/4", "3/3")
    assert (member.name, member.values["device"], member.values["node"]) == ("lines", "cpu", run.values["node"])
    assert member.values["loss"] == " ".join(f"{loss:.4g}" for loss in report["lines"].losses[-1].tolist())
    assert member.saved == run.saved
    assert run.saved is not None
    logged = events(tmp_path)
    assert (logged[0], logged[-1]) == ("started", "finished")
    # Lines of epochs are there however short these are; each save has one.
    assert logged.count("trained") >= 4
    assert logged.count("saved") == 20
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main(["status", str(tmp_path)]) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before, "nothing is written"
    assert train(tmp_path)["lines"].losses.shape == (20, 3)
    assert events(tmp_path)[len(logged) :] == ["resumed", "finished"]


def test_a_run_that_goes_on_is_killed_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    with waiting("train", folder, mark) as process:
        run, member = only(folder)
        assert (run.state, process_of(run)) == ("running", process.pid)
        assert counts(member)[0] == "training"
        assert 5 <= int(member.values["minibatch"].partition("/")[0]) <= 8
        assert main(["status", str(folder)]) == 0
        assert re.search(rf"hf.train, running \(process {process.pid} on .*\): last save", capsys.readouterr().out)
        process.send_signal(signal.SIGKILL)
        process.wait()
        run, member = only(folder)
        assert (run.state, member.state) == ("not running", "not running")
        assert main(["status", str(folder)]) == 0
        assert re.search(r"hf.train, not running: last save \d\d:\d\d \(", capsys.readouterr().out)
    mark.unlink()
    report = train(folder)
    run, member = only(folder)
    assert (run.state, process_of(run), counts(member)[:2]) == ("finished", os.getpid(), ("finished", "20/20"))
    logged = read_events(folder / "logs/arrays/lines.log")
    (resumed,) = [event for event in logged if event.event == "resumed"]
    assert 4 <= int(resumed.values["minibatch"].partition("/")[0]) <= 7
    torch.testing.assert_close(report["lines"].losses, hf.train(tasks(), MACHINE)["lines"].losses, rtol=0, atol=0)


def test_the_folder_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with resuming(tmp_path):
        for _ in range(2):
            hf.train(tasks(), MACHINE)
    assert main(["status", "--json", str(tmp_path)]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["folder"], second["folder"]) == (str(tmp_path / "train-1"), str(tmp_path / "train-2"))
    assert first["counts"] == {"finished": 1}
    assert first["members"][0]["values"]["minibatch"] == "20/20"
    assert datetime.fromisoformat(first["saved"]).tzinfo is not None
    shutil.copytree(tmp_path / "train-1", tmp_path / "train-10")
    assert [run.folder.name for run in read_status(tmp_path)] == ["train-1", "train-2", "train-10"]

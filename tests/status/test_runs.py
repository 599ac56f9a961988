"""`python -m hfusion status`: of runs that go on, have ended or were killed, and of damaged and other folders."""

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
from datetime import UTC, datetime
from pathlib import Path

import optuna
import pytest
import torch
import torch.nn.functional as F

import hfusion as hf
from hfusion.__main__ import main
from hfusion.checkpoint.files import MANIFEST, saves
from hfusion.core.event_log import read_events
from hfusion.core.resuming import resuming
from hfusion.status.runs import MemberStatus, RunStatus, SaveStatus, read_status
from hfusion.status.table import headline, print_status
from tests.status.running import sweep, tasks, train
from tests.tune.cases import MACHINE

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def waiting(kind: str, folder: Path, mark: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run in another process, which waits in a minibatch until the mark is removed."""
    environment = {**os.environ, "HFUSION_RATES": "standard", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.status.running", kind, str(folder), str(mark)]
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
    return member.state, member.done, member.total, member.epoch, member.epochs, member.training, member.stopped


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    report = train(tmp_path)
    run, member = only(tmp_path)
    assert (run.kind, run.state, run.process) == ("train", "finished", os.getpid())
    assert counts(member) == ("finished", 20, 20, 4, 4, 3, 0)
    assert (member.name, member.device, member.node) == ("lines", "cpu", run.node)
    assert member.value == " ".join(f"{loss:.4g}" for loss in report["lines"].losses[-1].tolist())
    assert member.saved == run.saved
    assert run.saved is not None
    assert run.saved.count == 20
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
        assert (run.state, run.process) == ("running", process.pid)
        assert counts(member)[0] == "training"
        assert member.done is not None
        assert 5 <= member.done <= 8
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
    assert (run.state, run.process, member.state, member.done) == ("finished", os.getpid(), "finished", 20)
    logged = read_events(folder / "logs/arrays/lines.log")
    (resumed,) = [event for event in logged if event.event == "resumed"]
    assert 4 <= int(resumed.values["minibatch"].partition("/")[0]) <= 7
    torch.testing.assert_close(report["lines"].losses, hf.train(tasks(), MACHINE)["lines"].losses, rtol=0, atol=0)


def test_a_run_that_ends_while_it_is_watched(tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    with waiting("train", folder, mark) as process:
        assert status(folder).state == "running"
        mark.unlink()
        while process.poll() is None:
            run, member = only(folder)
            assert run.state in ("running", "finished", "not running")
            assert member.state in ("training", "finished", "not running")
        assert process.returncode == 0
    assert status(folder).state == "finished"


def test_stopped_members_and_failed_runs_are_shown(tmp_path: Path) -> None:
    def on_result(result: hf.Step | hf.Evaluation) -> list[int]:
        return [1] if isinstance(result, hf.Step) and (result.epoch, result.step) == (0, 3) else []

    def broken(event: hf.Step | hf.Evaluation) -> None:
        if isinstance(event, hf.Step) and event.epoch == 2:
            raise ValueError("no more\nof this")

    with pytest.raises(hf.TrainError):
        train(tmp_path, broken, on_result=on_result)
    run, member = only(tmp_path)
    assert (run.state, member.state) == ("failed", "failed")
    assert member.error == "ValueError: no more"
    assert (member.training, member.stopped) == (2, 1)
    assert "nan" in (member.value or "")
    assert events(tmp_path).count("stopped") == 1
    train(tmp_path, on_result=on_result)
    _, member = only(tmp_path)
    assert (member.state, member.error, member.training, member.stopped) == ("finished", None, 2, 1)


def test_ctrl_c(tmp_path: Path) -> None:
    def pressed(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, pressed)
    run, member = only(tmp_path)
    assert (run.state, member.state) == ("interrupted", "not running")


def test_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    class Pruner(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            return trial.number == 1

    def make_model(kind: int) -> torch.nn.Module:
        if kind:
            raise ValueError("no such model")
        return torch.nn.Linear(3, 2)

    def space(trial: optuna.Trial) -> dict[str, object]:
        return {"lr": trial.suggest_float("lr", 0.01, 0.1), "kind": int(trial.number == 2)}

    result = hf.sweep(
        make_model,
        space,
        F.mse_loss,
        [(torch.ones(4, 3), torch.ones(4, 2))] * 2,
        trials=4,
        epochs=2,
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=Pruner(),
        machine=MACHINE,
        directory=tmp_path,
        catch=(ValueError,),
        processes=0,
    )
    run = status(tmp_path)
    assert (run.kind, run.state, run.trials) == ("sweep", "finished", 4)
    assert run.counts == {"complete": 2, "pruned": 1, "failed": 1}
    assert [member.state for member in run.members] == ["complete", "pruned", "failed", "complete"]
    assert run.members[0].value == f"{result.trials[0].value:.6g}"
    assert (run.members[0].epoch, run.members[0].epochs, run.members[1].epoch) == (2, 2, 1)
    assert run.members[2].error == "ValueError: no such model"
    assert events(tmp_path, "trials/0") == ["started", "evaluated", "finished"]
    assert events(tmp_path, "trials/1") == ["started", "pruned"]
    array = events(tmp_path, f"arrays/{run.members[0].array}")
    assert (array[0], array[-1], array.count("trained")) == ("started", "finished", 2)
    assert main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 trials: 2 complete, 1 failed, 1 pruned" in shown
    assert "trial 2: ValueError: no such model" in shown


def test_a_sweep_that_is_killed_and_resumed(tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", tmp_path / "mark"
    with waiting("sweep", folder, mark) as process:
        run = status(folder)
        assert (run.state, run.trials, run.counts) == ("running", 4, {"training": 2})
        process.send_signal(signal.SIGKILL)
        process.wait()
        run = status(folder)
        assert (run.state, run.counts) == ("not running", {"not running": 2})
        assert run.saved is not None
        assert run.saved.count == 1
    shutil.copytree(folder, tmp_path / "without logs")
    shutil.rmtree(tmp_path / "without logs/logs")
    sweep(folder, lambda: None)
    run = status(folder)
    assert (run.state, run.counts) == ("finished", {"complete": 4})
    assert events(folder, "trials/0") == ["started", "evaluated", "resumed", "evaluated", "finished"]
    run = status(tmp_path / "without logs")
    assert (run.kind, run.state, run.counts) == ("sweep", "unknown", {"unknown": 2})
    assert [member.epoch for member in run.members] == [1, 1]


def test_damage_is_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    manifest = saves(tmp_path / "lines")[-1] / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:100])
    log = tmp_path / "logs/arrays/lines.log"
    log.write_bytes(log.read_bytes()[:-20])
    run, member = only(tmp_path)
    assert counts(member)[:3] == ("training", 20, 20) or member.state == "not running"
    assert member.saved is not None
    assert member.saved.time is None
    assert "checksum" in (member.saved.problem or "")
    assert main(["status", str(tmp_path)]) == 0
    assert "damaged" in capsys.readouterr().out
    log.unlink()
    log.mkdir()
    assert "its log cannot be read" in (only(tmp_path)[1].error or "")
    shutil.rmtree(tmp_path / "logs")
    run, member = only(tmp_path)
    assert (run.state, member.state, member.done) == ("unknown", "unknown", None)
    shutil.rmtree(manifest.parent)
    _, member = only(tmp_path)
    assert (member.state, member.done, member.total) == ("unknown", 19, None)


def test_saves_on_another_node(tmp_path: Path) -> None:
    """Saves that are written there are not in the folder of the driver."""
    train(tmp_path)
    shutil.rmtree(tmp_path / "lines")
    run, member = only(tmp_path)
    assert (run.state, member.saved and member.saved.count) == ("finished", 20)


def test_folders_without_a_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("")
    hf.save(tmp_path / "one", hf.fuse([torch.nn.Linear(2, 1) for _ in range(2)]))
    for name, message in [
        ("nowhere", "is no folder"),
        ("file", "is no folder"),
        ("other", "holds no run"),
        ("one", "is a checkpoint of one array"),
    ]:
        assert main(["status", str(tmp_path / name)]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert str(tmp_path / name) in shown.err
        assert message in shown.err


def test_the_folder_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with resuming(tmp_path):
        for _ in range(2):
            hf.train(tasks(), MACHINE)
    assert main(["status", "--json", str(tmp_path)]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["folder"], second["folder"]) == (str(tmp_path / "train-1"), str(tmp_path / "train-2"))
    assert first["counts"] == {"finished": 1}
    assert first["members"][0]["done"] == 20
    assert datetime.fromisoformat(first["saved"]["time"]).tzinfo is not None
    shutil.copytree(tmp_path / "train-1", tmp_path / "train-10")
    assert [run.folder.name for run in read_status(tmp_path)] == ["train-1", "train-2", "train-10"]


def test_lines_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    now = datetime(2026, 5, 4, 12, 30, tzinfo=UTC)
    saved = SaveStatus(4, datetime(2026, 5, 2, 12, 0, tzinfo=UTC))
    members = tuple(MemberStatus(str(n), "complete" if n else "training", epoch=n, value="0.5") for n in range(30))
    run = RunStatus(Path("runs/[b]"), "sweep", "not running", saved=saved, trials=40, members=members)
    shown = headline(run, now)
    assert shown.startswith("runs/[b]: hf.sweep, not running: last save 2026-05-0")
    assert shown.endswith(" (2 d ago); 30 of 40 trials: 29 complete, 1 training")
    print_status([run], now)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == shown
    assert "... 9 more" in lines[2]
    assert len(lines) == 2 + 1 + 1 + 20
    failed = RunStatus(Path("a"), "train", "failed", error="ValueError: no")
    assert headline(failed, now) == "a: hf.train, failed (ValueError: no): last save none; 0 arrays: none begun"

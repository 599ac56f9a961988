"""``python -m hfusion run``: a script that is terminated and started again ends as one that was not."""

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
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.__main__ import main
from hfusion.core.event_log import read_events, resuming
from hfusion.status import MemberStatus, RunStatus, read_status
from tests.tune.cases import MACHINE

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys, time
import optuna
import torch.nn.functional as F
import hfusion as hf
from tests.tune.cases import MACHINE, loaders, make_model

optuna.logging.set_verbosity(optuna.logging.ERROR)

def metric(output, target):
    time.sleep(float(sys.argv[1]))
    return F.cross_entropy(output, target)

given = loaders()
for seed in (0, 1):
    result = hf.sweep(
        make_model, lambda t: {"lr": t.suggest_float("lr", 1e-4, 0.3, log=True)}, F.cross_entropy, given["loader"],
        eval_loader=given["eval_loader"], metric=metric, trials=6, epochs=3, rows=3, seed=seed, machine=MACHINE,
        sampler=optuna.samplers.RandomSampler(seed=seed), pruner=optuna.pruners.NopPruner(),
    )
    print([one.intermediate_values for one in result.trials])
    tasks = hf.Task(
        [make_model()], F.cross_entropy, lambda params: hf.optim.SGD(params, lr=0.1), given["loader"], seed=seed
    )
    print(hf.train(tasks, MACHINE)["task"].losses.tolist())
"""


def start(script: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "HFUSION_RATES": "standard", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "hfusion", "run", str(script), *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=script.parent
    )


def test_terminated_and_started_again(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    script = tmp_path / "script.py"
    script.write_text("import torch\ntorch.manual_seed(0)\n" + SCRIPT)
    whole, _ = start(script, "0").communicate()
    assert whole.count("\n") == 4
    folder = tmp_path / "runs"
    with start(script, "0.1", "--resume", str(folder)) as process:
        deadline = time.monotonic() + 120
        while not (folder / "sweep-1/state/save-000000000003").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, told
    assert told == "ended by SIGTERM; the same command goes on\n"
    again = start(script, "--resume", str(folder), "0")
    found, told = again.communicate()
    assert (again.returncode, found) == (0, whole), told
    assert sorted(path.name for path in folder.iterdir()) == ["sweep-1", "sweep-2", "train-1", "train-2"]
    once_more = start(script, "--resume", str(folder), "--", "0")
    assert once_more.communicate()[0] == whole


UNKNOWN = [["run", "nowhere.py"], ["walk", "x.py"], [], ["env", "--", "x"], ["cache"], ["cache", "clear", "all"]]


@pytest.mark.parametrize("arguments", UNKNOWN)
def test_what_cannot_be_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "python -m hfusion" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"hfusion {hf.__version__}\n")


def test_the_environment_and_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hfusion"
    (folder / "inner").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    (tmp_path / "other").write_bytes(b"stays")
    (folder / "inner" / "step-1.so").write_bytes(bytes(1024))
    (folder / "link").symlink_to("/")
    assert main(["env"]) == 0
    output = capsys.readouterr().out
    assert f"{folder}: 2 files, 1.0KiB, 1.0KiB of it compiled steps" in output
    assert all(text in output for text in (hf.__version__, torch.__version__, "C compiler", "accelerator"))
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"deleted 2 files, 1.0KiB, from {folder}\n"
    assert [*folder.iterdir()] == []
    assert (tmp_path / "other").exists()


# `python -m hfusion status`: of runs that go on, have ended or were killed, and of other folders.


def tasks(heard: Any = None) -> hf.Task:
    torch.manual_seed(0)
    return hf.Task(
        [nn.Linear(3, 2) for _ in range(3)],
        F.mse_loss,
        lambda params: hf.optim.SGD(params, lr=[0.1, 0.2, 0.3]),
        [(torch.ones(4, 3), torch.ones(4, 2))] * 5,
        epochs=4,
        name="lines",
        seed=0,
        callbacks=[] if heard is None else [heard],
    )


def train(folder: Path, heard: Any = None) -> hf.Report:
    return hf.train(tasks(heard), MACHINE, checkpoint=folder, every=2)


def train_and_wait(folder: Path, mark: Path) -> None:
    """Make a file in a minibatch, and go on when that is gone."""

    def heard(event: hf.Step | hf.Evaluation) -> None:
        if isinstance(event, hf.Step) and (event.epoch, event.step) == (1, 2):
            mark.touch()
            deadline = time.monotonic() + 120
            while mark.exists() and time.monotonic() < deadline:
                time.sleep(0.02)

    train(folder, heard)


@contextmanager
def waiting(folder: Path, mark: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run in another process, which waits in a minibatch until the mark is removed."""
    environment = {**os.environ, "HFUSION_RATES": "standard", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.test_main", str(folder), str(mark)]
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
    with waiting(folder, mark) as process:
        run, member = only(folder)
        assert (run.state, process_of(run), counts(member)[0]) == ("running", process.pid, "training")
        with pytest.raises(hf.CheckpointError, match="is in use by a run that goes on"):
            train(folder)
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_and_wait(Path(sys.argv[1]), Path(sys.argv[2]))

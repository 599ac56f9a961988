"""``python -m hfusion run``: a script that is terminated and started again ends as one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hfusion as hf
from hfusion.__main__ import main

ROOT = Path(__file__).parents[1]
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

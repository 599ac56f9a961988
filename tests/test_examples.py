"""Every example runs at a small size, and prints what it is about."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import hfusion as hf
from benchmarks import draw
from hfusion.bench import contact_benchmark, shard_benchmark, sweep_benchmark
from hfusion.bench.__main__ import NAMES, main
from hfusion.bench.cases import CASES, FuseCase, Workload, check_agreement, classified, losses
from hfusion.bench.contenders import CONTENDERS, start_serial
from hfusion.bench.models import mlp
from hfusion.bench.shard_benchmark import ShardCase, linears, seeded
from hfusion.schedule.engine import simulate
from hfusion.schedule.plan import Plan
from hfusion.schedule.timeline import Timeline
from tests.alone import Branch
from tests.schedule.compared import task
from tests.step.test_train_step import needs_compiler

ROOT = Path(__file__).parents[1]
# Arguments, with a file or folder for OUT; and words that are printed.
SMALL: dict[str, tuple[str, tuple[str, ...]]] = {
    "adapters": ("--members 2 --steps 10 --eager --out OUT", ("textwrap",)),
    "all_cores": ("--members 4 --steps 10", ("2 threads of torch's",)),
    "compiled_tasks": ("--members 3 --epochs 1", ("eager: compile=False", "one program of")),
    "customers": ("--customers 20 --days 6 --eager", ()),
    "deep_ensemble": ("--members 2 --epochs 1 --out OUT.png", ("ensemble of 2", "best member")),
    "digits_sweep": ("--members 2 --epochs 1 --batch 64 --out OUT.png", ("speed-up", "differs from alone")),
    "federated": ("--clients 12 --rounds 1 --part 0.5 --eager", ("accuracy",)),
    "first_second": ("--members 2 --seconds 0", ("2 eager steps",)),
    "kfold": ("--folds 3 --epochs 1 --eager", ("mean",)),
    "many_models_many_devices": ("--epochs 1 --out OUT", ("13 tasks  4 devices", "equal bit for bit")),
    "over_ranks": ("--members 8 --epochs 3", ("epoch 2: best",)),
    "member_sinks": ("", ()),
    "own_pace": ("--shops 4 --epochs 1 --eager", ()),
    "population": ("--members 4 --rounds 2 --eager", ("fixed rates",)),
    "resume": ("--steps 20", ("is killed at step", "the same, to the last bit")),
    "sparse_autoencoders": ("--width 8 --features 16 --ks 1 2 --steps 5", ()),
    "sweep": ("--trials 2 --epochs 1 --directory OUT", ("sweep 'sweep'  2 trials",)),
    "train_bigger_than_memory": (
        "--width 32 --layers 2 --steps 4 --memory 1MiB --out OUT.png",
        ("spilled", "equal, bit for bit", "of a budget of 1.0 MiB"),
    ),
}
COMPILED = ("all_cores", "compiled_tasks")


def test_every_example_is_run() -> None:
    assert SMALL.keys() == {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[needs_compiler] * (name in COMPILED)) for name in SMALL])
def test_an_example_runs(
    name: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("sklearn", "optuna", "peft", "transformers"):
        pytest.importorskip(package)
    if name == "all_cores":
        request.getfixturevalue("two_threads")
    example = importlib.import_module(f"examples.{name}")
    if name == "many_models_many_devices":
        digits = example.load(seed=0)
        few = replace(digits, train=TensorDataset(*digits.train[: 2 * example.BATCH]))
        monkeypatch.setattr(example, "load", lambda seed: few)
    arguments, words = SMALL[name]
    out = tmp_path / "out"
    example.main(arguments.replace("OUT", str(out)).split())
    printed = capsys.readouterr().out
    assert [word for word in words if word not in printed] == []
    if "OUT.png" in arguments:
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


# What a notebook and a prompt show: short, whole, and escaped.
X, TARGET = torch.randn(8, 4), torch.randint(3, (8,))


def array(kind: Callable[[], nn.Module]) -> hf.FusedModule:
    fused = hf.fuse([kind() for _ in range(2)])
    fused(X)
    return fused


def step_report(calls: int) -> object:
    fused = hf.fuse([nn.Linear(4, 3) for _ in range(2)])
    step = hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.1), compile=True)
    for _ in range(calls):
        step(X, TARGET)
    return step.report()


@cache
def large() -> Plan:
    """Of more tasks, devices and actions than are shown, with a name to escape."""
    tasks = [task(f"<{number}&>", 3, steps=40, resident=False) for number in range(30)]
    return Plan(tuple(tasks), {f"d{number}": 4096 for number in range(30)}, 1e3, 1e3)


@cache
def sweep() -> hf.SweepResult:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return hf.sweep(
        lambda: nn.Linear(4, 3),
        lambda trial: {"lr": trial.suggest_float("lr", 1e-3, 1e-1)},
        F.cross_entropy,
        [(X, TARGET)],
        eval_loader=[(X, TARGET)],
        trials=3,
        epochs=1,
        seed=0,
    )


SHOWN: dict[str, Callable[[], Any]] = {
    "fusion report": lambda: array(lambda: nn.Linear(4, 3)).report(),
    "fusion report with a loop": lambda: array(lambda: Branch(4, 3)).report(),
    "fusion report before a call": lambda: hf.fuse([nn.Linear(4, 3)]).report(),
    "step report": lambda: step_report(2),
    "step report before a call": lambda: step_report(0),
    "plan": large,
    "plan without tasks": lambda: Plan((), {"d": 1}, 1.0, 1.0),
    "timeline": lambda: simulate(large()),
    "timeline without actions": lambda: Timeline((), ("d",), 0.0),
    "sweep": sweep,
}


@pytest.mark.parametrize("name", SHOWN)
def test_short_in_a_prompt_and_whole_in_a_notebook(name: str) -> None:
    shown = SHOWN[name]()
    assert "\n" not in repr(shown)
    assert len(repr(shown)) < 400
    page = shown._repr_html_()
    assert len(page) < 60_000
    ElementTree.fromstring(f"<div>{page}</div>")


# ``python -m hfusion.bench`` and the scripts of benchmarks/: every command runs, and says what was wrong.
SHARDED = ShardCase(
    "tiny",
    "",
    partial(seeded, lambda: [mlp(*[8] * 7) for _ in range(2)]),
    partial(classified, 6, 8),
    linears,
    parts=(1, 2),
)


def rows_of(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--json", str(folder / "bench.json")]) == 0
    rows: list[dict[str, Any]] = json.loads((folder / "bench.json").read_text())["rows"]
    return rows


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert main(["fus"]) == 2
    shown = capsys.readouterr().out
    for name in (*NAMES, *(each.name for each in (*CASES, *CONTENDERS))):
        assert name in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fuse", "--models", "cnn,mlp"], "unknown name 'mlp': choose from mlp-small, mlp-large, cnn, resnet8,"),
        (["--contenders", "vmap,vmap"], "a name occurs twice in 'vmap,vmap'"),
        (["--members", "4,-1"], "'-1' is not a whole number of at least 1"),
        (["optim", "--repeats", "0"], "'0' is not a whole number of at least 1"),
        (["--device", "tpu"], "unknown device 'tpu': choose from cpu, cuda"),
        (["optim", "--models", "cnn"], "unrecognized arguments: --models cnn"),
        (["--json", "no-such-directory/x.json"], "there is no directory"),
        (["--amp", "fp8"], "argument --amp: invalid choice: 'fp8'"),
    ],
)
def test_a_bad_argument_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_fuse(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    arguments = ["--quick", "--models", "mlp-small", "--members", "2", "--contenders", "serial,vmap,processes,hfusion"]
    command = [sys.executable, "-m", "hfusion.bench", *arguments, "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mlp-small" in done.stdout
    read = json.loads(target.read_text())
    assert {"cpu", "cores", "threads", "torch", "python", "platform", "date", "command"} <= read["machine"].keys()
    assert [row["contender"] for row in read["rows"]] == ["serial", "vmap", "processes", "hfusion"]
    assert read["rows"][0]["speedup"] == 1.0
    assert all(row["ms"] > 0 and row["reason"] == "" for row in read["rows"])
    assert read["rows"][3]["best_other"] in ("serial", "vmap", "processes")
    pytest.importorskip("matplotlib")
    draw.main([str(target), str(tmp_path / "bench.svg")])
    assert "mlp-small" in (tmp_path / "bench.svg").read_text()


@pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))
def test_models_train_as_alone(case: FuseCase) -> None:
    work, (ours,) = Workload(case, 2, torch.device("cpu")), [each for each in CONTENDERS if each.name == "hfusion"]
    check_agreement("hfusion", losses(start_serial(work), 2), losses(ours.start(work), 2), work.tolerance)


def test_short(tmp_path: Path) -> None:
    options = ["--models", "mlp-small", "--members", "2", "--steps", "2", "--contenders", "eager-cold"]
    (row,) = rows_of(tmp_path, "short", "--quick", *options)
    assert (row["contender"], row["reason"], row["seconds"] > 0) == ("eager-cold", "", True)


def test_lora(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "lora", "--quick", "--members", "2", "--contenders", "peft,hfusion")
    assert [(row["contender"], row["reason"]) for row in rows] == [("peft", ""), ("hfusion", "")]


def test_contact(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, "contact", "--quick", "--only", "facts")
    assert (row["status"], row["figures"]["computes"]) == ("ok", True)
    assert contact_benchmark.checks_of(quick=True)["hf.train spilled"][1](torch.device("cpu"))["shards"] > 1


def test_optim(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "optim", "--quick", "--members", "2", "--repeats", "1")
    assert len(rows) == 9 * 5
    assert all(row["ns_per_param"] > 0 for row in rows)


def test_sweep(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    threads = torch.get_num_threads()
    names = "one-by-one,threads,hfusion"
    rows = rows_of(tmp_path, "sweep", "--quick", "--contenders", names, "--trials", "3")
    torch.set_num_threads(threads)
    assert [row["contender"] for row in rows] == names.split(",")
    assert sweep_benchmark.pointnet()(sweep_benchmark.solids().judge[0]).shape == (320, 4)
    for row in rows:
        assert row["trials"] == 3
        assert 3 <= row["epochs"] <= 9
        assert row["speedup"] == rows[0]["seconds"] / row["seconds"]


def test_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_benchmark, "QUICK_CASES", (SHARDED,))
    rows = rows_of(tmp_path, "shard", "--quick")
    ours = shard_benchmark.OURS.name
    assert [(row["budget"], row["contender"]) for row in rows] == [
        ("1/1", "plain loop"),
        ("1/1", ours),
        ("1/2", ours),
        ("-", "fsdp2 offload"),
    ]
    assert all(row["ms"] > 0 for row in rows)
    assert [row["shards"] for row in rows[:2]] == [1, 1]
    assert rows[2]["shards"] > 1
    assert rows[2]["peak_bytes"] <= rows[0]["peak_bytes"] // 2

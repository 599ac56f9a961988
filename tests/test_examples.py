"""Every example runs at a small size, and prints what it is about."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import hfusion as hf
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

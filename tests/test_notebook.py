"""What a notebook and a prompt show: short, whole, and escaped."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.schedule.engine import simulate
from hfusion.schedule.plan import Plan
from hfusion.schedule.timeline import Timeline
from tests.alone import Branch
from tests.shards import task

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

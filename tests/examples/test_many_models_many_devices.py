"""Twelve tasks on four devices at a small size: what comes out, and that a task equals the plain loop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import hfusion as hf
from examples import many_models_many_devices as example
from examples.many_models_many_devices import Digits


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Digits:
    """Two minibatches of digits, also for the example itself."""
    whole = example.load(seed=0)
    digits = replace(whole, train=TensorDataset(*whole.train[: 2 * example.BATCH]))
    monkeypatch.setattr(example, "load", lambda seed: digits)
    return digits


def test_main_prints_and_draws(few: Digits, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new"
    example.main(["--epochs", "1", "--out", str(out)])
    for name in ("plan", "simulated", "timeline"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {device.name for device in example.MACHINE.devices}
    printed = capsys.readouterr().out
    for words in ("13 tasks  4 devices", "makespan", "what the tasks learned", "mlp-two-shapes", "equal bit for bit"):
        assert words in printed


def test_there_are_twelve_tasks_of_both_modes(few: Digits) -> None:
    tasks = example.make_tasks(few, epochs=1, seed=0)
    assert len(tasks) == 12
    assert sum(task.clip_norm is not None for task in tasks) == sum(task.accumulate > 1 for task in tasks) == 1
    plan = hf.plan(tasks, example.MACHINE)
    assert {task.resident for task in plan.tasks} == {True, False}


def test_a_task_of_many_equals_the_plain_loop(few: Digits) -> None:
    tasks = example.make_tasks(few, epochs=2, seed=3)
    chosen = next(task for task in tasks if task.name == "mlp-clipped")
    spilled = next(task for task in tasks if task.name == "mlp-huge")
    report = hf.train([spilled, chosen], example.MACHINE)
    fused = hf.fuse(chosen.models)
    optimizer = chosen.optimizer(list(fused.parameters()))
    torch.manual_seed(3)
    losses = []
    for _ in range(2):
        for images, labels in chosen.loader:
            optimizer.zero_grad()
            row = hf.per_model(F.cross_entropy)(fused(images), labels)
            row.sum().backward()
            hf.optim.clip_grad_norm_(fused.parameters(), 1.0)
            optimizer.step()
            losses.append(row.detach())
    assert torch.equal(report["mlp-clipped"].losses, torch.stack(losses))


def test_the_check_finds_a_difference(few: Digits) -> None:
    (task, *_) = example.make_tasks(few, epochs=1, seed=0)
    report = hf.train([task], example.MACHINE)
    example.check_alone(task, report)
    with torch.no_grad():
        report[task.name].models[0][1].bias[0] += 1
    with pytest.raises(AssertionError, match=r"1\.bias differs"):
        example.check_alone(task, report)


def test_refuses_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main(["--epochs", "0"])
    assert "--epochs is 0; it must be at least 1" in capsys.readouterr().err

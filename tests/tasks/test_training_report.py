"""The progress and the report of a run fit on one screen."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import hfusion as hf
from hfusion.schedule.plan import Plan
from hfusion.tasks.bars import TaskBars
from hfusion.tasks.training_report import Report, TaskReport
from tests.trained import Way, batches, fused, machine
from tests.trained import task as trained

NAN, RATES = float("nan"), torch.tensor([0.1, 0.2, 0.3])


def task_report(
    members: int, steps: int = 4, *, evaluated: bool = False, stopped: dict[int, int] | None = None
) -> TaskReport:
    losses = torch.arange(steps * members, dtype=torch.float64).reshape(steps, members).flip(0) / members
    evaluations = torch.arange(2 * members, dtype=torch.float64).reshape(1, 2, members) if evaluated else None
    return TaskReport(losses, evaluations, stopped or {}, torch.logspace(-3, 0, members), ())


def whole(tasks: dict[str, TaskReport], devices: int = 2) -> Report:
    budgets = {f"device-{k}": 1 << 30 for k in range(devices)}
    line: Any = SimpleNamespace(makespan=12.34, utilisation=0.875)
    return Report(tasks, Plan((), budgets, 1.0, 1.0), line, dict.fromkeys(budgets, 1 << 20))


@pytest.mark.parametrize("count", [0, 1, 2, 17, 18, 19, 1000])
@pytest.mark.parametrize("members", [1, 3, 2000])
def test_a_report_fits_a_screen(count: int, members: int) -> None:
    tasks = {f"a-long-name-of-a-task-that-goes-on-{k}": task_report(members, stopped={0: 2}) for k in range(count)}
    report = whole(tasks, 40)
    for text in (str(report), repr(report), *map(str, [*tasks.values()][:1])):
        lines = text.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 100


def test_a_report_says_what_there_was() -> None:
    text = str(whole({"sweep": task_report(3, stopped={1: 2}), "other": task_report(1, evaluated=True)}))
    assert text.splitlines() == [
        "2 tasks, 4 members, 2 devices: 12.3 s, computing 88% of the time",
        "peak: device-0 1.0MiB of 1.0GiB, device-1 1.0MiB of 1.0GiB",
        "task   members  stopped  minibatches     metric  best  member     lr  median  worst",
        "sweep        3        1            4  last loss     0       0  0.001  0.6667  2.333",
        "other        1        0            4  eval loss   0.5       0  0.001     0.5    0.5",
    ]


def test_the_last_losses_are_those_before_a_member_stopped() -> None:
    report = TaskReport(torch.tensor([[3.0, 2.0, NAN], [1.0, NAN, NAN]]), None, {1: 1}, RATES, ())
    torch.testing.assert_close(report.final_losses, torch.tensor([1.0, 2.0, NAN]), equal_nan=True)
    assert report.ranked == [0, 1, 2]
    means = torch.tensor([[[3.0, 2.0, NAN], [1.0, 2.0, NAN]], [[0.5, NAN, NAN], [0.5, NAN, NAN]]])
    report = TaskReport(report.losses, means, {1: 1}, RATES, ())
    torch.testing.assert_close(report.final_losses, torch.tensor([0.5, 2.0, NAN]), equal_nan=True)
    assert str(report).splitlines()[2].split() == ["0", "0.1", "3", "0.5", "2"]
    assert str(report).splitlines()[3].split() == ["1", "0.2", "2", "2", "stopped", "after", "1"]


def shown(tasks: int, console: Console, over: int | None = None) -> None:
    with TaskBars([(f"t{k}", 20) for k in range(tasks)], [0] * tasks, console) as bars:
        for step in range(20):
            for index in range(tasks):
                if index != over or step < 3:
                    bars.advance(index)
                if index == over and step == 3:
                    bars.advance(index, over=True)


@pytest.mark.parametrize("tasks", [1, 5, 300])
def test_a_file_gets_ten_lines(tasks: int) -> None:
    shown(tasks, Console(file=(out := io.StringIO()), width=100), over=0 if tasks > 1 else None)
    lines = out.getvalue().splitlines()
    assert 7 <= len(lines) <= 10
    done = 20 * tasks - (17 if tasks > 1 else 0)
    assert lines[-1].startswith(f"{done}/{done} minibatches of t0")


@pytest.mark.parametrize("tasks", [1, 5, 300])
def test_bars_fit_a_screen(tasks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfusion.core.progress_output._REDRAW", 0.02)
    terminal: Any = {"force_terminal": True, "_environ": {"TERM": "xterm"}}
    console = Console(file=(out := io.StringIO()), width=100, height=24, **terminal)
    shown(tasks, console)
    # A frame begins by going up over the one before.
    frames = [frame.count("\n") for frame in out.getvalue().split("\x1b[2K\r" if tasks == 1 else "\r\x1b[2K")]
    assert max(frames) <= 20


def test_a_run_prints_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    task = trained(fused(), Way(), batches(torch.float64), eval_loader=batches(torch.float64, 2))
    report = hf.train(task, machine(), progress=True, on_result=lambda result: [2])
    print(report, report["task"], sep="\n")
    printed = capsys.readouterr().out.splitlines()
    assert "10/10 minibatches of task" in printed[9]
    assert printed[10].startswith("1 task, 3 members, 1 device: ")
    assert "stopped after 1" in printed[-1]


def test_rates_are_those_before_schedules_in_the_order_of_the_models() -> None:
    """Also where members of one task are trained as several arrays."""
    models = [torch.nn.Linear(4, 3), torch.nn.Sequential(torch.nn.Linear(4, 3)), torch.nn.Linear(4, 3)]
    loader = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(2)]
    task = hf.Task(
        models,
        torch.nn.functional.cross_entropy,
        lambda params: hf.optim.SGD(params, lr=[0.1, 0.2, 0.3]),
        loader,
        epochs=2,
        eval_loader=loader,
        scheduler=lambda opt: torch.optim.lr_scheduler.LinearLR(opt, 0.5),
        restore_best=True,
    )
    report = hf.train(task, machine())["task"]
    assert report.rates.tolist() == [0.1, 0.2, 0.3]
    assert report.best_epochs is not None
    assert report.best_epochs.dtype is torch.int64
    best = report.ranked[0]
    lines = str(report).splitlines()
    row = lines[next(index for index, line in enumerate(lines) if line.startswith("member")) + 1]
    assert row.split()[:2] == [str(best), f"{report.rates[best]:.4g}"]
    assert report.metric == "best eval loss"

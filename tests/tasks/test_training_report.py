"""The progress and the report of a run fit on one screen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hfusion as hf
from hfusion.schedule.plan import Plan
from hfusion.tasks.training_report import Report, TaskReport
from tests.trained import Way, batches, fused, machine
from tests.trained import task as trained


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


def test_a_run_prints_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    task = trained(fused(), Way(), batches(torch.float64), eval_loader=batches(torch.float64, 2))
    report = hf.train(task, machine(), progress=True, on_result=lambda result: [2])
    print(report, report["task"], sep="\n")
    printed = capsys.readouterr().out.splitlines()
    assert "10/10 minibatches of task" in printed[9]
    assert printed[10].startswith("1 task, 3 members, 1 device: ")
    assert "stopped after 1" in printed[-1]

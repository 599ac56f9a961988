"""Any plan, on any devices, by any policy: the same bits as the plain loop, within every budget."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hfusion as hf
from hfusion.device.device_queues import Queue
from hfusion.schedule.plan import Plan
from hfusion.tasks.task import Step
from tests.schedule.compared import COMPARED
from tests.trained import Way, adamw, assert_same, batches, fused, machine, momentum, plain, planned, task

# Any plan, on any devices, by any policy: the same bits as the plain loop, within every budget.
LOADER = batches(torch.float64, 2)
WAYS = (Way(adamw), Way(momentum, 0.5), Way(adamw, None, 2), Way(momentum, 0.5, 2))


class Small(nn.Module):
    """A tied weight, dropout, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.first(x)))
        return self.out(self.first(h) + x)


@cache
def fused_and_expected(index: int) -> tuple[hf.FusedModule, tuple[Tensor, dict[str, Tensor]]]:
    torch.manual_seed(index)
    array = fused(Small)
    return array, plain(array, WAYS[index], LOADER)


CUTS = st.tuples(st.integers(1, 5), st.booleans(), st.booleans())


@settings(deadline=None, max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(CUTS, min_size=1, max_size=4),
    st.lists(st.integers(0, 600) | st.sampled_from([5_000, 50_000]), min_size=1, max_size=3),
    st.sampled_from(sorted(COMPARED)),
)
def test_any_plan_gives_the_same_bits(cuts: list[tuple[int, bool, bool]], spare: list[int], policy: str) -> None:
    """Each device has some bytes more than the largest task needs."""
    arrays, expected = zip(*(fused_and_expected(index) for index in range(len(cuts))), strict=True)
    tasks = [task(array, WAYS[index], LOADER, f"t{index}") for index, array in enumerate(arrays)]
    on = machine(len(spare))
    plan = planned(tasks, on, *map(list, zip(*cuts, strict=True)))
    budgets = {name: size + more for (name, size), more in zip(plan.devices.items(), spare, strict=True)}
    assert_same(arrays, tasks, expected, on, replace(plan, devices=budgets), COMPARED[policy])


def test_a_device_too_small_for_some_tasks_runs_the_others() -> None:
    arrays, expected = zip(*(fused_and_expected(index) for index in range(3)), strict=True)
    tasks = [task(array, WAYS[index], LOADER, f"t{index}") for index, array in enumerate(arrays)]
    on = machine(3)
    plan = planned(tasks, on, [1, 3, 5], [True, False, False])
    needs = sorted(task_plan.device_bytes for task_plan in plan.tasks)
    small = Plan(plan.tasks, dict(zip(plan.devices, (needs[0] - 1, needs[0], needs[2]), strict=True)), 1.0, 1.0)
    report = assert_same(arrays, tasks, expected, on, small)
    assert report.peak["cpu:0"] == 0
    assert {action.device for action in report.timeline.actions} <= {"cpu:1", "cpu:2"}


def test_tasks_on_two_devices_run_at_the_same_time() -> None:
    """Each waits for the other in the midst of its minibatches."""
    meet = threading.Barrier(2, timeout=60)
    arrays, expected = zip(*(fused_and_expected(index) for index in range(2)), strict=True)

    def wait(step: Step) -> None:
        if step.step == 0 and step.epoch == 0:
            meet.wait()

    tasks = [task(array, WAYS[index], LOADER, f"t{index}", callbacks=[wait]) for index, array in enumerate(arrays)]
    on = machine(2)
    assert_same(arrays, tasks, expected, on, planned(tasks, on, [2, 3], [True, False]))


@pytest.mark.parametrize("lane", ["in", "compute", "out"])
def test_an_error_of_a_device_is_that_of_its_task(monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    """A device reports its errors when a thread waits for it."""

    def lost(self: Queue) -> None:
        if threading.current_thread().name == f"cpu:0 {lane}":
            raise RuntimeError("the device is lost")

    array, _ = fused_and_expected(0)
    on, trained_task = machine(), task(array, WAYS[0], LOADER, "t")
    plan = planned([trained_task], on, [3], [False])
    monkeypatch.setattr(Queue, "wait", lost)
    with pytest.raises(hf.TrainError, match="'t' failed: RuntimeError: the device is lost"):
        hf.train([trained_task], on, plan=plan)

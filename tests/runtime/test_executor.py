"""Any plan, on any devices, by any policy: the same bits as the plain loop, within every budget."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from time import perf_counter, sleep

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hfusion as hf
from hfusion.runtime import executor, lanes
from hfusion.runtime.copying import Copier, Move, Moves, ThreadCopier, Ticket, copy_now
from hfusion.runtime.memory import Ledger
from hfusion.schedule.actions import Act
from hfusion.schedule.plan import Phase, Plan
from hfusion.schedule.policy import POLICIES, Candidate, Order, Policy, State
from hfusion.tasks.task import Step
from tests.trained import Way, adamw, assert_same, batches, fused, machine, momentum, plain, planned, task

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
def made(index: int) -> tuple[hf.FusedModule, tuple[Tensor, dict[str, Tensor]]]:
    torch.manual_seed(index)
    array = fused(Small)
    return array, plain(array, WAYS[index], LOADER)


CUTS = st.tuples(st.integers(1, 5), st.booleans(), st.booleans())


@settings(deadline=None, max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(CUTS, min_size=1, max_size=4),
    st.lists(st.integers(0, 600) | st.sampled_from([5_000, 50_000]), min_size=1, max_size=3),
    st.sampled_from(sorted(POLICIES)),
)
def test_any_plan_gives_the_same_bits(cuts: list[tuple[int, bool, bool]], spare: list[int], policy: str) -> None:
    """Each device has some bytes more than the largest task needs."""
    arrays, expected = zip(*(made(index) for index in range(len(cuts))), strict=True)
    tasks = [task(array, WAYS[index], LOADER, f"t{index}") for index, array in enumerate(arrays)]
    on = machine(len(spare))
    plan = planned(tasks, on, *map(list, zip(*cuts, strict=True)))
    budgets = {name: size + more for (name, size), more in zip(plan.devices.items(), spare, strict=True)}
    assert_same(arrays, tasks, expected, on, replace(plan, devices=budgets), policy)


def thirds(order: Order, state: State) -> Candidate | None:
    """Two units of a task, then another's."""
    running = state.running
    return running if running is not None and running.unit % 3 else state.waiting.first(state.budget) or running


def test_what_was_loaded_for_later_leaves_with_its_task() -> None:
    arrays, expected = zip(*(made(index) for index in range(3)), strict=True)
    tasks = [task(array, WAYS[index], LOADER, f"t{index}") for index, array in enumerate(arrays)]
    on = machine()
    plan = planned(tasks, on, [5, 5, 5], [False] * 3)
    budgets = {name: size + 50_000 for name, size in plan.devices.items()}
    policy = Policy("thirds", "two units of a task, then another's", lambda candidate: candidate.since, thirds)
    report = assert_same(arrays, tasks, expected, on, replace(plan, devices=budgets), policy)
    used, vain = {}, 0
    for action in report.timeline.actions:
        place = action.task, action.shard
        vain += action.act is Act.EVICT and not used[place]
        used[place] = action.act is not Act.LOAD
    assert vain > 0


def test_where_there_is_room_later_shards_are_loaded_too() -> None:
    array, expected = made(0)
    one, on = task(array, WAYS[0], LOADER), machine()
    plan = planned([one], on, [5], [False])
    ((name, size),) = plan.devices.items()
    report = assert_same([array], [one], [expected], on, replace(plan, devices={name: size + 50_000}))
    actions = report.timeline.actions
    first = next(action for action in actions if action.act is Act.FORWARD)
    before = {action.shard for action in actions if action.act is Act.LOAD and action.end <= first.start}
    # The next one borrows a weight from these.
    assert before == {0, 1, 2}


@pytest.mark.parametrize("kept", [False, True])
def test_activations_are_accounted_for_until_their_backward(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """Between the two units of the last shard, when nothing runs, too."""
    taken: list[tuple[int, int]] = []

    class Noted(Ledger):
        def give(self, size: int) -> None:
            super().give(size)
            taken.append((size, self.taken))

    monkeypatch.setattr(executor, "Ledger", Noted)
    array, expected = made(0)
    one, on = task(array, WAYS[0], LOADER), machine()
    plan = planned([one], on, [4], [False], [kept])
    assert_same([array], [one], [expected], on, plan)
    (last,) = (each for each in plan.tasks[0].shards if each.index == 3)
    entry = plan.tasks[0].shards[2].boundary
    between = [after for size, after in taken if size == plan.tasks[0].freed_bytes(Phase.FORWARD, 3)]
    wanted = plan.tasks[0].held_bytes(Phase.BACKWARD, 3) + last.activations + entry
    assert len(between) >= len(LOADER)
    assert all(after >= wanted for after in between)


def test_a_device_too_small_for_some_tasks_runs_the_others() -> None:
    arrays, expected = zip(*(made(index) for index in range(3)), strict=True)
    tasks = [task(array, WAYS[index], LOADER, f"t{index}") for index, array in enumerate(arrays)]
    on = machine(3)
    plan = planned(tasks, on, [1, 3, 5], [True, False, False])
    needs = sorted(each.device_bytes for each in plan.tasks)
    small = Plan(plan.tasks, dict(zip(plan.devices, (needs[0] - 1, needs[0], needs[2]), strict=True)), 1.0, 1.0)
    report = assert_same(arrays, tasks, expected, on, small)
    assert report.peak["cpu:0"] == 0
    assert {action.device for action in report.timeline.actions} <= {"cpu:1", "cpu:2"}


def test_tasks_on_two_devices_run_at_the_same_time() -> None:
    """Each waits for the other in the midst of its minibatches."""
    meet = threading.Barrier(2, timeout=60)
    arrays, expected = zip(*(made(index) for index in range(2)), strict=True)

    def wait(step: Step) -> None:
        if step.step == 0 and step.epoch == 0:
            meet.wait()

    tasks = [task(array, WAYS[index], LOADER, f"t{index}", callbacks=[wait]) for index, array in enumerate(arrays)]
    on = machine(2)
    assert_same(arrays, tasks, expected, on, planned(tasks, on, [2, 3], [True, False]))


def test_threads_of_python_copy_as_the_one_of_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def python(name: str, device: torch.device, threads: int) -> tuple[Copier, Copier]:
        return ThreadCopier(f"{name} in", device, threads), ThreadCopier(f"{name} out", device, threads)

    monkeypatch.setattr(lanes, "copiers", python)
    arrays, expected = zip(*(made(index) for index in range(3)), strict=True)
    tasks = [task(array, WAYS[index], LOADER, f"t{index}") for index, array in enumerate(arrays)]
    on = machine(2)
    assert_same(arrays, tasks, expected, on, planned(tasks, on, [4, 3, 2], [False, False, True]))


class Gradual:
    """Copies slowly, one move after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def submit(self, moves: Moves) -> Ticket:
        return GradualTicket([self._pool.submit(self._copy, move) for move in moves] or [self._pool.submit(now)])

    def _copy(self, move: Move) -> tuple[float, float]:
        began, _ = now()
        sleep(0.005)
        copy_now([move])
        return began, perf_counter()

    def close(self) -> None:
        self._pool.shutdown()


class GradualTicket:
    def __init__(self, copies: list[Future[tuple[float, float]]]) -> None:
        self._copies = copies

    def done(self, moves: int | None = None) -> bool:
        return all(copy.done() for copy in self._copies[:moves])

    def wait(self, moves: int | None = None) -> tuple[float, float]:
        times = [copy.result() for copy in self._copies[:moves]]
        return times[0][0], times[-1][1]


def now() -> tuple[float, float]:
    return perf_counter(), perf_counter()


def slow(name: str, device: torch.device, threads: int) -> tuple[Copier, Copier]:
    """What leaves goes back gradually."""
    return ThreadCopier(f"{name} in", device, threads), Gradual()


def test_a_unit_waits_for_no_more_room_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "copiers", slow)
    array, expected = made(0)
    one, on = task(array, WAYS[0], LOADER), machine()
    plan = planned([one], on, [5], [False])
    ((name, size),) = plan.devices.items()
    report = assert_same([array], [one], [expected], on, replace(plan, devices={name: size + 300}))
    weights = [shard.weights for shard in plan.tasks[0].shards]
    evicted = [action for action in report.timeline.actions if action.act is Act.EVICT]
    early = [a for a, b in pairwise(evicted) if a.shard == b.shard and a.bytes == weights[a.shard] and a.end <= b.start]
    assert early


def test_a_backward_recomputes_while_the_room_for_the_rest_of_it_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "copiers", slow)
    array, expected = made(0)
    one, on = task(array, WAYS[0], LOADER), machine()
    plan = planned([one], on, [5], [False])
    (shards,), (budget,) = plan.tasks, plan.devices.values()
    way = Phase.BACKWARD
    both = [shards.held_bytes(way, k) + shards.held_bytes(way, k + 1) for k in range(4)]
    waits = [
        k for k, size in enumerate(both) if size + shards.again_bytes(k) <= budget < size + shards.extra_bytes(way, k)
    ]
    report = assert_same([array], [one], [expected], on, plan)
    actions = report.timeline.actions
    left = {(a.step, a.shard): a.end for a in actions if a.act is Act.EVICT}
    begun = {(a.act, a.step, a.shard): a.start for a in actions if a.act.lane == "compute"}
    early = [
        (step, k)
        for step in range(len(LOADER))
        for k in waits
        if begun[Act.RECOMPUTE, step, k] < left[step, k + 1] <= begun[Act.BACKWARD, step, k]
    ]
    assert early


@pytest.mark.parametrize("resident", [False, True], ids=["spilled", "resident"])
def test_gradients_that_were_there_before_play_no_part(resident: bool) -> None:
    array, expected = made(0)
    for param in array.parameters():
        param.grad = torch.ones_like(param)
    one, on = task(array, WAYS[0], LOADER), machine()
    try:
        assert_same([array], [one], [expected], on, planned([one], on, [3], [resident]))
    finally:
        array.zero_grad()

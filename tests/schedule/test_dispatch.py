"""The dispatcher and its policies: which unit begins next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfusion.schedule.engine import Slices
from hfusion.schedule.plan import Plan, Shard, TaskPlan
from hfusion.schedule.policy import Candidate, Dispatcher, State, Waiting
from tests.schedule.compared import COMPARED
from tests.shards import plans, task

# The dispatcher: it counts started units, and passes the remaining work to the policy.
LONGEST = COMPARED["sharded-lrtf"]


@given(plans(), st.sampled_from(sorted(COMPARED)))
def test_every_unit_begins_once_and_in_order(plan: Plan, policy: str) -> None:
    dispatcher = Dispatcher(plan, COMPARED[policy])
    budget = max(plan.devices.values())
    begun: list[list[object]] = [[] for _ in plan.tasks]
    running = dispatcher.choose(budget, None)
    while running is not None:
        assert dispatcher.unfinished()
        expected = dispatcher.next(running)
        unit = dispatcher.begin_unit(running)
        assert unit == expected
        begun[running].append(unit)
        chosen = dispatcher.choose(budget, running)
        if chosen != running:
            dispatcher.add_waiting(running)
        running = chosen
    assert not dispatcher.unfinished()
    assert not dispatcher.has_waiting()
    assert not any(map(dispatcher.next, range(len(plan.tasks))))
    assert begun == [[task_plan.unit(number) for number in range(task_plan.units)] for task_plan in plan.tasks]


def test_a_task_that_runs_is_chosen_by_no_other_device() -> None:
    dispatcher = Dispatcher(Plan((task("a", steps=2), task("b")), {"d": 99, "e": 99}, 1.0, 1.0), LONGEST)
    assert [dispatcher.choose(99, None) for _ in range(3)] == [0, 1, None]
    assert not dispatcher.has_waiting()
    dispatcher.begin_unit(0)
    dispatcher.add_waiting(0)
    assert dispatcher.has_waiting()
    assert dispatcher.choose(1, None) is None
    assert dispatcher.choose(99, None) == 0


# Policies: which candidate they choose, and that they are pure.
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        task=st.integers(0, 99),
        unit=st.integers(0, 9),
        remaining=st.floats(0, 100),
        quantum=st.floats(0.1, 10),
        since=st.integers(0, 99),
        need=st.integers(0, 30),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda candidate: candidate.task,
)


def state(name: str, candidates: list[Candidate], running: Candidate | None = None, share: float = 0.0) -> State:
    waiting = Waiting(COMPARED[name].order, [10, 20, 30])
    for candidate in candidates:
        waiting.add(candidate)
    return State(20, running, waiting, share)


A = Candidate(task=0, unit=1, remaining=5.0, quantum=1.0, since=7, need=3)
B = Candidate(task=1, unit=1, remaining=9.0, quantum=1.0, since=8, need=15)
C = Candidate(task=2, unit=1, remaining=7.0, quantum=1.0, since=2, need=3)


@pytest.mark.parametrize(
    ("name", "chosen"), [("sharded-lrtf", B), ("patient-lrtf", A), ("fifo", A), ("round-robin", C)]
)
def test_a_running_task_goes_on_or_not(name: str, chosen: Candidate) -> None:
    assert COMPARED[name](state(name, [B, C], running=A, share=20.0)) is chosen


@given(CANDIDATES, st.sampled_from(sorted(COMPARED)))
def test_a_decision_is_pure_and_finds_the_least(candidates: list[Candidate], name: str) -> None:
    chooser = COMPARED[name]
    current_state = state(name, candidates)
    chosen = chooser(current_state)
    assert chooser(current_state) is chosen
    assert chooser(state(name, candidates[::-1])) is chosen
    fitting = [candidate for candidate in candidates if candidate.need <= current_state.budget]
    least = min(fitting, key=lambda candidate: (chooser.order(candidate), candidate.task), default=None)
    assert chosen is least


# Minibatches that are scheduled several at a time, and reported one by one.
SHARD = Shard(0, 0, 4, 100, 80, 160, 50, 10, 200, 0, 0.002, 0.004, 0.002)


def plan(epoch: int, epochs: int, **values: object) -> TaskPlan:
    return TaskPlan("one", (SHARD,), epoch * epochs, True, epoch=epoch, **values)  # type: ignore[arg-type]


PLANS = {
    "one minibatch": plan(1, 1),
    "one epoch": plan(7, 1),
    "epochs": plan(7, 3),
    "evaluated": plan(7, 2, evaluated=2),
    "clipped": plan(7, 2, clipped=True, evaluated=1),
    "accumulated": plan(7, 2, accumulate=3),
    "saved": plan(7, 2, save_every=2),
    "saved where it is evaluated": plan(6, 2, evaluated=2, save_every=6),
    "both": plan(5, 2, accumulate=2, clipped=True, evaluated=1, save_every=3),
}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("name", PLANS)
def test_slices_are_the_minibatches_in_order(name: str, size: int) -> None:
    whole = PLANS[name]
    slices = Slices(whole, min(size, whole.epoch or 1))
    ends = [slices.end(index) for index in range(slices.scheduled.steps)]
    assert [slices.first(index) for index in range(slices.scheduled.steps)] == [0, *ends[:-1]]
    assert ends[-1] == whole.steps
    assert set(range(whole.epoch or 1, whole.steps + 1, whole.epoch or 1)) <= set(ends)
    assert slices.scheduled.device_bytes == whole.device_bytes
    assert slices.scheduled.seconds == pytest.approx(whole.seconds)

"""The dispatcher: it counts started units, and passes the remaining work to the policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfusion.schedule.dispatch import Dispatcher
from hfusion.schedule.plan import Plan
from hfusion.schedule.policy import POLICIES, Candidate, Policy, State
from tests.schedule.compared import COMPARED
from tests.shards import plans, task

FIFO, LONGEST = COMPARED["fifo"], COMPARED["sharded-lrtf"]


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


@given(plans(), st.sampled_from(sorted(POLICIES)), st.data())
def test_who_ends_early_is_forgotten(plan: Plan, policy: str, data: st.DataObject) -> None:
    dispatcher = Dispatcher(plan, POLICIES[policy])
    budget = max(plan.devices.values())
    stop = data.draw(st.integers(0, len(plan.tasks) - 1))
    begins, more = data.draw(st.integers(1, plan.tasks[stop].units)), data.draw(st.integers(0, 1))
    begun = [0] * len(plan.tasks)
    running = dispatcher.choose(budget, None)
    while running is not None:
        dispatcher.begin_unit(running)
        begun[running] += 1
        if running == stop and begun[running] == begins:
            dispatcher.end(stop, more)
            assert (dispatcher.next(stop) is not None) == bool(min(more, plan.tasks[stop].units - begins))
        chosen = dispatcher.choose(budget, running)
        if chosen != running:
            dispatcher.add_waiting(running)
        running = chosen
    assert not dispatcher.unfinished()
    expected = [task.units for task in plan.tasks]
    expected[stop] = min(begins + more, expected[stop])
    assert begun == expected


def test_a_policy_sees_what_is_left_except_where_the_last_shard_turns() -> None:
    task_plan = task("a", 2, steps=2, accumulate=2, clipped=True)
    states: list[State] = []

    def watch(order: object, state: State) -> Candidate | None:
        states.append(state)
        return state.running or state.waiting.first(state.budget)

    plan = Plan((task_plan,), {"d": 99, "e": 99}, 1.0, 1.0)
    dispatcher = Dispatcher(plan, Policy("watch", "", FIFO.order, watch))
    assert dispatcher.choose(99, None) == 0
    consulted = []
    for _ in range(task_plan.units):
        dispatcher.begin_unit(0)
        before = len(states)
        dispatcher.choose(99, 0)
        consulted.append(len(states) > before)
    shown = [state.running for state in states[1:-1]]
    assert consulted == [True, False, True, True, True, False, True, True, True, True]
    units = [number for number, was_consulted in enumerate(consulted[:-1], 1) if was_consulted]
    assert [candidate.unit for candidate in shown if candidate] == units
    assert [candidate.since for candidate in shown if candidate] == units
    assert [candidate.remaining for candidate in shown if candidate] == [10.0 - number for number in units]
    assert {(candidate.quantum, candidate.need) for candidate in shown if candidate} == {(1.0, task_plan.device_bytes)}
    assert [state.share for state in states] == [(10.0 - number) / 2 for number in (0, *units, 10)]
    assert states[-1].running is None


def test_a_task_that_runs_is_chosen_by_no_other_device() -> None:
    dispatcher = Dispatcher(Plan((task("a", steps=2), task("b")), {"d": 99, "e": 99}, 1.0, 1.0), LONGEST)
    assert [dispatcher.choose(99, None) for _ in range(3)] == [0, 1, None]
    assert not dispatcher.has_waiting()
    dispatcher.begin_unit(0)
    dispatcher.add_waiting(0)
    assert dispatcher.has_waiting()
    assert dispatcher.choose(1, None) is None
    assert dispatcher.choose(99, None) == 0


def test_a_task_that_is_done_neither_waits_nor_begins() -> None:
    dispatcher = Dispatcher(Plan((task("a"),), {"d": 99}, 1.0, 1.0), LONGEST)
    assert dispatcher.choose(99, None) == 0
    for _ in range(2):
        dispatcher.begin_unit(0)
    assert dispatcher.next(0) is None
    dispatcher.add_waiting(0)
    assert dispatcher.choose(99, 0) is None
    assert not dispatcher.unfinished()
    with pytest.raises(IndexError, match="task 'a' has no unit left to begin"):
        dispatcher.begin_unit(0)


@pytest.mark.parametrize(("begun", "more"), [(0, 3), (2, 0), (2, 1), (3, 50)])
def test_a_task_that_ends_early_counts_its_units_no_more(begun: int, more: int) -> None:
    task_plan = task("a", steps=5)
    dispatcher = Dispatcher(Plan((task_plan, task("b")), {"d": 99}, 1.0, 1.0), LONGEST)
    assert dispatcher.choose(99, None) == 0
    for _ in range(begun):
        dispatcher.begin_unit(0)
    dispatcher.end(0, more)
    for _ in range(min(more, task_plan.units - begun)):
        assert dispatcher.unfinished()
        dispatcher.begin_unit(0)
    assert dispatcher.next(0) is None
    assert dispatcher.choose(99, 0) == 1
    while dispatcher.next(1) is not None:
        assert dispatcher.unfinished()
        dispatcher.begin_unit(1)
    assert not dispatcher.unfinished()


def test_no_tasks() -> None:
    dispatcher = Dispatcher(Plan((), {"d": 1}, 1.0, 1.0), LONGEST)
    assert dispatcher.choose(1, None) is None
    assert not dispatcher.unfinished()
    assert not dispatcher.has_waiting()

"""The dispatcher and its policies: which unit begins next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfusion.core.errors import PlanError
from hfusion.schedule.engine import Slices
from hfusion.schedule.plan import Phase, Plan, Shard, TaskPlan
from hfusion.schedule.policy import POLICIES, Candidate, Dispatcher, Policy, State, Waiting
from hfusion.schedule.simulate import simulate
from hfusion.schedule.timeline import Timeline
from tests.schedule import compared as policies
from tests.schedule.compared import COMPARED
from tests.shards import plans, task

# The dispatcher: it counts started units, and passes the remaining work to the policy.
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
    seconds = [task_plan.unit_seconds(task_plan.unit(number)) for number in range(task_plan.units)]
    assert [candidate.remaining for candidate in shown if candidate] == [sum(seconds[number:]) for number in units]
    assert {(candidate.quantum, candidate.need) for candidate in shown if candidate} == {(2.0, task_plan.device_bytes)}
    assert [state.share for state in states] == [sum(seconds[number:]) / 2 for number in (0, *units, 10)]
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
TOO_LARGE = Candidate(task=3, unit=0, remaining=99.0, quantum=1.0, since=0, need=21)


@pytest.mark.parametrize(
    ("name", "chosen"), [("sharded-lrtf", B), ("patient-lrtf", B), ("fifo", A), ("round-robin", C)]
)
def test_an_idle_device_gets_the_first_that_fits(name: str, chosen: Candidate) -> None:
    assert COMPARED[name](state(name, [A, B, C, TOO_LARGE])) is chosen


@pytest.mark.parametrize(
    ("name", "chosen"), [("sharded-lrtf", B), ("patient-lrtf", A), ("fifo", A), ("round-robin", C)]
)
def test_a_running_task_goes_on_or_not(name: str, chosen: Candidate) -> None:
    assert COMPARED[name](state(name, [B, C], running=A, share=20.0)) is chosen


@pytest.mark.parametrize("name", ["sharded-lrtf", "patient-lrtf"])
@pytest.mark.parametrize("share", [0.0, 99.0])
def test_of_two_that_are_equal_the_running_one_goes_on(name: str, share: float) -> None:
    assert COMPARED[name](state(name, [A._replace(task=9)], running=A, share=share)) is A


def test_patience_ends_when_a_task_would_end_too_late() -> None:
    patient = COMPARED["patient-lrtf"]
    assert patient(state("patient-lrtf", [B], running=A, share=10.1)) is A
    assert patient(state("patient-lrtf", [B], running=A, share=10.0)) is B
    assert patient(state("patient-lrtf", [B], running=A._replace(remaining=8.5), share=10.0)).task == A.task


@pytest.mark.parametrize("name", sorted(COMPARED))
def test_nothing_waits(name: str) -> None:
    assert COMPARED[name](state(name, [])) is None
    assert COMPARED[name](state(name, [TOO_LARGE])) is None
    assert COMPARED[name](state(name, [TOO_LARGE], running=A)) is A


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


def test_waiting_gives_all_in_order() -> None:
    waiting = state("sharded-lrtf", [A, B, C, TOO_LARGE]).waiting
    ordered = []
    while (first := waiting.first(30)) is not None:
        ordered.append(first)
        waiting.take(30)
        assert bool(waiting) == (len(ordered) < 4)
    assert ordered == [TOO_LARGE, B, C, A]
    with pytest.raises(IndexError):
        waiting.take(30)
    with pytest.raises(PlanError, match="needs 31 bytes"):
        waiting.add(A._replace(need=31))


def test_seeds_differ() -> None:
    orders = [[policies.random(seed).order(A._replace(task=task)) for task in range(20)] for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert len(set(orders[0])) == 20


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


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", PLANS)
def test_a_run_goes_on_with_the_slice_that_it_had_begun(name: str, size: int) -> None:
    whole = PLANS[name]
    slices = Slices(whole, min(size, whole.epoch or 1))
    scheduled = slices.scheduled
    for steps in range(whole.steps):
        unit = scheduled.unit(slices.unit_index_after(steps))
        assert unit.phase is Phase.FORWARD
        assert slices.first(unit.step) <= steps < slices.end(unit.step)
    assert slices.unit_index_after(whole.steps) == scheduled.units


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", PLANS)
def test_spans_are_those_of_the_minibatches(name: str, size: int) -> None:
    """The timeline of a run of slices, reported by minibatches, is valid for the plan."""
    whole = PLANS[name]
    slices = Slices(whole, min(size, whole.epoch or 1))
    coarse, fine = (Plan((task_plan,), {"cpu": 10_000}, 1e6, 1e6) for task_plan in (slices.scheduled, whole))
    simulated = simulate(coarse)
    spans = sorted(slices.spans(simulated.actions, 0, whole.steps), key=lambda span: span.start)
    timeline = Timeline(tuple(spans), simulated.devices, simulated.lower_bound)
    timeline.validate(fine)
    assert Timeline.parse(timeline.text()) == timeline


def test_slices_take_no_long_time() -> None:
    assert Slices.of(plan(1000, 2), False).size == 6
    assert Slices.of(plan(3, 2), False).size == 3
    slow = TaskPlan("slow", (Shard(0, 0, 4, 1, 1, 1, 1, 1, 1, 0, 1.0, 2.0, 1.0),), 9, True)
    assert Slices.of(slow, False).size == 1
    # Where nothing else waits for a device.
    assert Slices.of(plan(1000, 2), True).size == 1000
    assert Slices.of(slow, True).size == 9

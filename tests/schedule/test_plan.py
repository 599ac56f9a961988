"""Plans of tasks in shards: derived values, refused arguments, text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfusion.core.errors import PlanError
from hfusion.schedule.actions import Act, Action
from hfusion.schedule.engine import Slices
from hfusion.schedule.lower import levels, lower, need
from hfusion.schedule.plan import Phase, Plan, Shard, TaskPlan, Unit
from hfusion.schedule.policy import Candidate, Dispatcher, State, Waiting
from hfusion.schedule.timeline import Span
from tests.schedule.compared import COMPARED, plans, shard, task, tasks

FORWARD, BACKWARD, UPDATE, EVALUATE = Phase


def by_definition(task_plan: TaskPlan) -> list[Unit]:
    """The units of a task, minibatch after minibatch."""
    units, count = [], len(task_plan.shards)
    epoch = task_plan.epoch or task_plan.steps
    for step in range(task_plan.steps):
        ends = (step + 1) % epoch == 0 or (step % epoch + 1) % task_plan.accumulate == 0
        units += [Unit(task_plan.name, step, FORWARD, index, False) for index in range(count)]
        units += [
            Unit(task_plan.name, step, BACKWARD, index, ends and not task_plan.clipped)
            for index in reversed(range(count))
        ]
        units += [
            Unit(task_plan.name, step, UPDATE, index, True) for index in range(count) if ends and task_plan.clipped
        ]
        evaluations = range(step // epoch * task_plan.evaluated, (step + 1) // epoch * task_plan.evaluated)
        units += [
            Unit(task_plan.name, evaluation, EVALUATE, index, False)
            for evaluation in evaluations
            for index in range(count)
        ]
    return units


@given(tasks("a"))
def test_units_and_their_seconds_are_those_of_the_minibatches(task_plan: TaskPlan) -> None:
    units = [task_plan.unit(number) for number in range(task_plan.units)]
    assert units == by_definition(task_plan)
    assert task_plan.update_count * len(task_plan.shards) == sum(unit.updates for unit in units)
    assert {unit.step for unit in units if unit.updates} == {
        step for step in range(task_plan.steps) if task_plan.closes(step)
    }
    assert task_plan.seconds == pytest.approx(sum(task_plan.unit_seconds(unit) for unit in units))
    counted = Counter((unit.phase, unit.shard, unit.updates) for unit in units)
    assert task_plan.counts == counted
    assert task_plan.device_bytes >= max(
        task_plan.actions_of(unit).evict.frees + task_plan.actions_of(unit).extra for unit in units
    )


@given(tasks("a"))
def test_a_task_is_saved_at_the_first_border_where_that_is_due_and_at_its_end(task_plan: TaskPlan) -> None:
    every, before, saved = task_plan.save_every, 0, []
    for unit in map(task_plan.unit, range(task_plan.units)):
        steps = task_plan.ended(unit)
        if steps is not None and every is not None:
            if steps == task_plan.steps or steps // every > before // every:
                saved.append(unit)
            before = steps
        assert (task_plan.actions_of(unit).computes[-1].act is Act.SAVE) == (unit in saved)
        assert any(action.act is Act.STEP for action in task_plan.actions_of(unit).computes) == unit.updates
    assert not (every and not saved)


def test_a_task_that_fits_no_device_names_the_smallest_budget() -> None:
    task_plan = task("large", weights=1000)
    with pytest.raises(PlanError, match=r"'large'.*largest budget is 500.*budget that would do is 1,004 bytes"):
        Plan((task_plan,), {"a": 500, "b": 20}, 1.0, 1.0)
    Plan((task_plan,), {"a": 1004, "b": 20}, 1.0, 1.0)


@pytest.mark.parametrize(
    ("tasks", "devices", "rate", "message"),
    [
        ((task("a"), task("a")), {"d": 99}, 1.0, "two tasks are named 'a'"),
        ((task("a"),), {}, 1.0, "no device"),
        ((task("a"),), {"d 0": 99}, 1.0, "one word"),
        ((task("a"),), {"d": 99}, 0.0, "load_rate is 0.0 bytes/s: it must be positive"),
    ],
)
def test_a_bad_plan(tasks: tuple[TaskPlan, ...], devices: dict[str, int], rate: float, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(tasks, devices, rate, 1.0)


BAD: dict[str, Callable[[], object]] = {
    "one word": lambda: task("two words"),
    "0 steps": lambda: task("a", steps=0),
    "weights is -1": lambda: shard(0, weights=-1),
    "forward is nan": lambda: shard(0, forward=float("nan")),
    "shard 0: frozen is 2 bytes, weights 1:": lambda: shard(0, frozen=2),
    "frozen is -1": lambda: shard(0, frozen=-1),
    r"'a' is resident in 2 shards\. Give a resident task one shard": lambda: task("a", 2, resident=True),
    "accumulate 0: each must be at least 1": lambda: task("a", accumulate=0),
    "3 steps in epochs of 0: give steps as a whole number of epochs": lambda: task("a", steps=3, epoch=0),
    "3 steps in epochs of 2: give": lambda: task("a", steps=3, epoch=2),
    "3 steps in epochs of 5: give": lambda: task("a", steps=3, epoch=5),
    "'a' is saved every 0 minibatches: give at least 1, or None": lambda: task("a", save_every=0),
    "begins at node 2, the one before ends at 1": lambda: TaskPlan(
        "a", (shard(0), replace(shard(1), first=2, last=3)), 1, False
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_tasks_and_shards(message: str) -> None:
    with pytest.raises(PlanError, match=message):
        BAD[message]()


def test_lower_bound() -> None:
    """The longest task with the 2 bytes that it must load first, or the work of all by the number of devices."""
    assert Plan((task("a"), task("b", steps=9)), {"d": 99, "e": 99}, 1.0, 1.0).lower_bound == 2.0 + 27.0
    assert Plan((task("a"), task("b"), task("c")), {"d": 99, "e": 99}, 1.0, 1.0).lower_bound == 2.0 + 3.0
    assert Plan((task("a"), task("b"), task("c")), {"d": 99, "e": 99}, 1e9, 1.0).lower_bound == 4.5
    assert Plan((), {"d": 1}, 1.0, 1.0).lower_bound == 0.0


def test_the_graph_says_what_comes_after_what() -> None:
    plan_graph = Plan((task("a", 2, resident=False), task("b")), {"d": 99}, 4.0, 1.0).graph()
    places = {name: [index for node, index in plan_graph if node == name] for name in ("a", "b")}
    assert places["a"] == [*range(13)]
    assert plan_graph.nodes["a", 0]["seconds"] == 1 / 4
    assert all(plan_graph.has_edge(("a", before), ("a", index)) for before, index in ((0, 1), (1, 2), (2, 8), (8, 9)))
    assert not any(before[0] != after[0] for before, after in plan_graph.edges)


def test_print() -> None:
    plan = Plan((task("a"), task("b", 2, resident=False)), {"d": 2048}, 1024.0, 1.0)
    lines = str(plan).split("\n")
    assert lines[0] == "plan  2 tasks  1 devices: d 2.0KiB  (host to device 1.0KiB/s, back 1B/s)"
    assert [line.split()[:2] for line in lines[2:]] == [["a", "resident"], ["b", "spilled"]]
    spilled = task("k", 2, resident=False, kept=True, weights=1000)
    shown = str(Plan((*plan.tasks, spilled), {"d": 9000}, 1.0, 1.0)).split("\n")
    assert [line.split()[6] for line in shown[1:]] == ["stays", "all", "-", "1001B"]
    moved = task("c", 2, steps=2, resident=False, clipped=True, accumulate=2, weights=1000, boundary=0)
    assert "4.9KiB" in str(Plan((moved,), {"d": 2048}, 1.0, 1.0)).split("\n")[2]


# Lowering: the bytes of the list are those of the plan, and the lists of some tasks as text.


def lowered(task_plan: TaskPlan, *, evaluate: bool = False) -> tuple[Action, ...]:
    sums, saves = task_plan.accumulate > 1, task_plan.save_every is not None
    return lower(
        task_plan.shards,
        keeps_last=bool(task_plan.pinned),
        accumulate=sums,
        clip=task_plan.clipped,
        evaluate=evaluate,
        growth=task_plan.growth,
        save=saves,
    )


def boundary(task_plan: TaskPlan, index: int) -> int:
    """Bytes at the cut before a shard."""
    return task_plan.shards[index - 1].boundary if index else 0


def alone(task_plan: TaskPlan, action: Action) -> int:
    """Bytes on the device while a task computes, by definition: state, both cuts, what the act works with."""
    part, last = task_plan.shards[action.shard], action.shard == len(task_plan.shards) - 1
    carried = part.gradients if task_plan.carried else 0
    cuts = boundary(task_plan, action.shard) + part.boundary
    state = part.weights + carried + (0 if task_plan.clipped else part.optimizer)
    kept = bool(task_plan.pinned)
    if kept and last:
        state = part.weights + part.optimizer + carried
    beside = task_plan.host_bytes(len(task_plan.shards) - 1) if kept and not last else 0
    if action.act is Act.STEP and task_plan.clipped:
        return beside + part.weights + part.optimizer + part.gradients
    works = {
        Act.FORWARD: part.workspace + (part.activations if last else 0),
        Act.EVALUATE: part.workspace,
        Act.STEP: 0,
    }.get(action.act, max(part.peak, part.activations) if last else part.peak)
    if action.act is Act.STEP:
        return beside + state + (0 if last else cuts)
    if action.act is Act.EVALUATE or (action.act is Act.FORWARD and not last):
        state = state if kept and last else part.weights
    return beside + state + cuts + works


@given(tasks("a"))
def test_the_bytes_on_the_device_are_those_of_the_definition(task_plan: TaskPlan) -> None:
    lists = [lowered(task_plan)] + ([lowered(task_plan, evaluate=True)] if task_plan.evaluated else [])
    assert task_plan.device_bytes == max(map(need, lists))
    for actions in lists:
        for action, level in zip(actions, levels(actions), strict=True):
            if action.act is Act.SAVE:
                assert action.takes == action.frees == 0
                assert action.moves == sum(part.weights + part.optimizer for part in task_plan.shards)
            elif action.act.lane == "compute":
                assert level == alone(task_plan, action)
        assert sum(action.takes - action.frees for action in actions) == 0


def test_a_shard_that_borrows_comes_after_its_owner() -> None:
    parts = (shard(0), shard(1), shard(2, boundary=0, borrows=(0,)))
    loads = [action for action in lower(parts, clip=True) if (action.act, action.shard) == (Act.LOAD, 2)]
    evicted = lower(parts, clip=True).index
    forward, update = (action.after for action in loads)
    assert [lower(parts, clip=True)[index].shard for index in forward if index >= 0] == [0]
    assert ~2 in forward
    assert len(update) == 1
    assert evicted(loads[0]) < evicted(loads[1])


# The dispatcher and its policies: which unit begins next.
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


def test_a_task_that_runs_is_chosen_by_no_other_device_and_may_end_early() -> None:
    dispatcher = Dispatcher(Plan((task("a", steps=2), task("b")), {"d": 99, "e": 99}, 1.0, 1.0), LONGEST)
    assert [dispatcher.choose(99, None) for _ in range(3)] == [0, 1, None]
    assert not dispatcher.has_waiting()
    dispatcher.begin_unit(0)
    dispatcher.add_waiting(0)
    assert dispatcher.has_waiting()
    assert dispatcher.choose(1, None) is None
    assert dispatcher.choose(99, None) == 0
    dispatcher.end(0, 0)
    while dispatcher.next(1) is not None:
        assert dispatcher.unfinished()
        dispatcher.begin_unit(1)
    assert not dispatcher.unfinished()


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
    assert LONGEST(state("sharded-lrtf", [C._replace(remaining=A.remaining)], running=A)) is A


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


def test_minibatches_of_a_slice_run_within_its_backward() -> None:
    """Its forward computes nothing, and its backward may have waited for memory."""
    acts, times = (Act.FORWARD, Act.BACKWARD), ((0.0, 1.0), (5.0, 7.0))
    spans = [Span(act, "a", 0, 0, "d", *time, 9) for act, time in zip(acts, times, strict=True)]
    found = [*Slices(PLANS["one epoch"], 7).spans(spans, 0, 7)]
    assert {span.step for span in found} == set(range(7))
    assert all(5.0 <= span.start <= span.end <= 7.0 for span in found)

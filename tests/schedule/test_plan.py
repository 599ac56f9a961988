"""Plans of tasks in shards: derived values, refused arguments, text."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from hfusion.core.errors import PlanError
from hfusion.schedule.actions import Act
from hfusion.schedule.plan import Phase, Plan, TaskPlan, Unit
from tests.shards import shard, task, tasks

FORWARD, BACKWARD, UPDATE, EVALUATE = Phase


def test_bytes_of_a_shard_at_rest() -> None:
    """Gradients are among them if they outlive their unit."""
    sizes = {"weights": 1, "gradients": 2, "optimizer": 4}
    assert [task("a", clipped=clipped, **sizes).host_bytes(0) for clipped in (False, True)] == [5, 7]
    assert shard(0).seconds == 3.0


def test_units_go_forward_ascending_and_backward_descending() -> None:
    task_plan = task("a", count=2, steps=2)
    assert [task_plan.unit(number) for number in range(task_plan.units)] == [
        Unit("a", step, phase, index, updates=phase is BACKWARD)
        for step in range(2)
        for phase, index in ((FORWARD, 0), (FORWARD, 1), (BACKWARD, 1), (BACKWARD, 0))
    ]


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


def kinds(task_plan: TaskPlan) -> str:
    """The units of a task of one shard: F, B, B! if it updates, U, E."""
    units = (task_plan.unit(number) for number in range(task_plan.units))
    return " ".join(u.phase[0].upper() + "!" * (u.updates and u.phase is BACKWARD) for u in units)


@pytest.mark.parametrize(
    ("task_plan", "expected"),
    [
        (task("a", steps=2), "F B! F B!"),
        (task("a", steps=3, accumulate=2), "F B F B! F B!"),
        (task("a", steps=2, accumulate=9), "F B F B!"),
        (task("a", steps=6, epoch=3, accumulate=2), "F B F B! F B! F B F B! F B!"),
        (task("a", steps=2, clipped=True), "F B U F B U"),
        (task("a", steps=4, epoch=2, accumulate=3, clipped=True), "F B F B U F B F B U"),
        (task("a", steps=3, accumulate=2, clipped=True), "F B F B U F B U"),
        (task("a", steps=4, epoch=2, evaluated=3), "F B! F B! E E E F B! F B! E E E"),
        (task("a", steps=2, epoch=1, clipped=True, evaluated=1), "F B U E F B U E"),
    ],
)
def test_when_the_optimizer_steps(task_plan: TaskPlan, expected: str) -> None:
    assert kinds(task_plan) == expected


SPILLED = {"weights": 1000, "frozen": 300, "gradients": 200, "optimizer": 400, "activations": 50}
CUTS = {"workspace": 7, "boundary": 10}


@pytest.mark.parametrize(
    ("accumulate", "clipped", "phase", "index", "held", "extra", "moved_in", "moved_out"),
    [
        (1, False, FORWARD, 1, 1010, 17, 1010, 10),
        (1, False, BACKWARD, 1, 1420, 257, 1420, 1110),
        (1, False, FORWARD, 2, 1400, 67, 1410, 1110),
        (1, False, BACKWARD, 2, 1400, 267, None, 1110),
        (2, False, FORWARD, 1, 1010, 17, 1010, 10),
        (2, False, BACKWARD, 1, 1620, 257, 1620, 1310),
        (2, False, FORWARD, 2, 1600, 67, 1610, 1310),
        (1, True, BACKWARD, 1, 1220, 257, 1220, 210),
        (1, True, FORWARD, 2, 1200, 67, 1210, 210),
        (1, True, BACKWARD, 2, 1200, 267, None, 210),
        (1, True, UPDATE, 1, 1600, 0, 1600, 1100),
        (1, False, EVALUATE, 1, 1010, 17, 1010, 10),
        (1, False, EVALUATE, 2, 1010, 7, 1010, 0),
    ],
)
def test_memory_and_copies_of_a_spilled_unit(
    accumulate: int,
    clipped: bool,
    phase: Phase,
    index: int,
    held: int,
    extra: int,
    moved_in: int | None,
    moved_out: int,
) -> None:
    """The last shard is loaded for its forward, and evicted after its backward."""
    task_plan = task("a", 3, resident=False, accumulate=accumulate, clipped=clipped, **SPILLED, **CUTS)
    actions = task_plan.unit_actions[phase, index]
    assert (actions.evict.frees, actions.extra, actions.evict.moves) == (held, extra, moved_out)
    assert (None if actions.load is None else actions.load.moves) == moved_in
    assert actions.evicts_shard == ((phase, index) != (FORWARD, 2))


@pytest.mark.parametrize(("clipped", "home"), [(False, 1400), (True, 1600)])
def test_a_kept_shard_holds_the_same_in_every_unit(clipped: bool, home: int) -> None:
    task_plan = task("a", 3, resident=False, clipped=clipped, evaluated=1, kept=True, **SPILLED, **CUTS)
    other = replace(task_plan, keeps_last_shard=False)
    assert [task_plan.host_bytes(2), task_plan.pins[2].takes] == [home, home]
    phases = [phase for phase in Phase if (phase, 2) in task_plan.unit_actions]
    assert {task_plan.unit_actions[phase, 2].evict.frees for phase in phases} == {home}
    assert not any(
        task_plan.unit_actions[phase, 2].load or task_plan.unit_actions[phase, 2].evicts_shard for phase in phases
    )
    middle = [other.unit_actions[phase, 1] for phase in phases]
    assert task_plan.device_bytes == home + max(turn.evict.frees + turn.extra for turn in middle)


def test_a_kept_shard_does_not_move() -> None:
    task_plan = task("a", 3, resident=False, kept=True, **SPILLED, **CUTS)
    first_in, first_out = 1000 + 1410, 10 + 1100
    middle_in, middle_out = 1010 + 1420, 10 + 1110
    assert task_plan.moved_bytes == (first_in + middle_in, first_out + middle_out)
    assert replace(task_plan, keeps_last_shard=False).moved_bytes == (
        first_in + middle_in + 1410,
        first_out + middle_out + 1110,
    )
    resident = task("b", **SPILLED, **CUTS)
    assert resident.moved_bytes == (0, 0)
    assert (task_plan.pinned, resident.pinned) == ({2}, {0})


def test_updates_and_evaluations_move_as_often_as_they_come() -> None:
    task_plan = task(
        "a", 1, steps=4, epoch=2, resident=False, clipped=True, accumulate=2, evaluated=1, **SPILLED, **CUTS
    )
    (forward, update, evaluation) = (task_plan.unit_actions[phase, 0].load for phase in (FORWARD, UPDATE, EVALUATE))
    assert forward is not None
    assert update is not None
    assert evaluation is not None
    assert task_plan.moved_bytes[0] == forward.moves + update.moves / 2 + evaluation.moves / 2


def test_clipping_leaves_the_optimizer_out_of_the_backward() -> None:
    values = {"weights": 10, "gradients": 10, "optimizer": 100, "activations": 50}
    plain, clipped = (task("a", resident=False, clipped=clips, **values) for clips in (False, True))
    assert plain.device_bytes == 10 + 10 + 100 + 50 + 1
    assert clipped.device_bytes == 10 + 10 + 100


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


def test_the_last_shard_turns_at_once() -> None:
    task_plan = task("a", 2, epoch=1, evaluated=1)
    units = [task_plan.unit(number) for number in range(task_plan.units)]
    assert [task_plan.must_follow(unit) for unit in units] == [False, False, True, False, False, False]


def test_a_resident_task_recomputes_nothing() -> None:
    task_plan = task("a", steps=5, workspace=100)
    assert task_plan.device_bytes == (1 + 1) + (1 + 1 + 100)
    assert task_plan.step_seconds == 3.0
    assert task_plan.seconds == 15.0


def test_a_spilled_task_needs_its_largest_unit_and_recomputes_all_but_the_last() -> None:
    task_plan = task("a", count=3, resident=False, weights=10, activations=7, workspace=100)
    middle_backward = (10 + 1 + 1) + 1 + 1 + 7 + 100
    assert task_plan.device_bytes == middle_backward
    assert task_plan.step_seconds == 9.0 + 2.0


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


def test_bad_tasks_and_shards() -> None:
    with pytest.raises(PlanError, match="one word"):
        task("two words")
    with pytest.raises(PlanError, match="0 steps"):
        task("a", steps=0)
    with pytest.raises(PlanError, match="weights is -1"):
        shard(0, weights=-1)
    with pytest.raises(PlanError, match="forward is nan"):
        shard(0, forward=float("nan"))
    with pytest.raises(PlanError, match="shard 0: frozen is 2 bytes, weights 1:"):
        shard(0, frozen=2)
    with pytest.raises(PlanError, match="frozen is -1"):
        shard(0, frozen=-1)
    with pytest.raises(PlanError, match=r"'a' is resident in 2 shards\. Give a resident task one shard"):
        task("a", 2, resident=True)
    with pytest.raises(PlanError, match="accumulate 0: each must be at least 1"):
        task("a", accumulate=0)
    for epoch in (0, 2, 5):
        with pytest.raises(PlanError, match=f"3 steps in epochs of {epoch}: give steps as a whole number of epochs"):
            task("a", steps=3, epoch=epoch)
    with pytest.raises(PlanError, match="'a' is saved every 0 minibatches: give at least 1, or None"):
        task("a", save_every=0)
    with pytest.raises(PlanError, match="begins at node 2, the one before ends at 1"):
        TaskPlan("a", (shard(0), replace(shard(1), first=2, last=3)), 1, False)


def test_lower_bound() -> None:
    """The longest task with the 2 bytes that it must load first, or the work of all by the number of devices."""
    assert Plan((task("a"), task("b", steps=9)), {"d": 99, "e": 99}, 1.0, 1.0).lower_bound == 2.0 + 27.0
    assert Plan((task("a"), task("b"), task("c")), {"d": 99, "e": 99}, 1.0, 1.0).lower_bound == 2.0 + 3.0
    assert Plan((task("a"), task("b"), task("c")), {"d": 99, "e": 99}, 1e9, 1.0).lower_bound == 4.5
    assert Plan((), {"d": 1}, 1.0, 1.0).lower_bound == 0.0


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

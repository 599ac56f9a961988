"""The simulator: any plan and policy gives a valid timeline, near the lower bound where it must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfusion.core.errors import PlanError
from hfusion.schedule.actions import Act
from hfusion.schedule.plan import Plan
from hfusion.schedule.policy import Policy, State
from hfusion.schedule.simulate import simulate
from tests.schedule.compared import COMPARED, MIXES, plan_of
from tests.shards import overlapped, plans, task


@settings(deadline=None, max_examples=150)
@given(plans(), st.sampled_from(sorted(COMPARED)))
def test_any_plan_and_policy_gives_a_valid_timeline(plan: Plan, policy: str) -> None:
    chosen = COMPARED[policy]
    timeline = simulate(plan, chosen)
    timeline.validate(plan)
    assert timeline.makespan >= plan.lower_bound * (1 - 1e-9)
    assert 0 <= timeline.utilisation <= 1 + 1e-9
    assert all(timeline.peak[name] <= budget for name, budget in plan.devices.items())
    assert simulate(plan, chosen) == timeline


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("tasks", "devices"), [(8, 4), (9, 4), (16, 8), (17, 8), (40, 8)])
def test_near_the_lower_bound_with_two_tasks_per_device(tasks: int, devices: int, mix: str) -> None:
    plan = plan_of(tasks, devices, mix)
    assert simulate(plan, "patient-lrtf").makespan <= 1.05 * plan.lower_bound


@pytest.mark.parametrize("mix", MIXES)
def test_very_near_it_with_sixteen_tasks_per_device(mix: str) -> None:
    plan = plan_of(1024, 64, mix)
    assert simulate(plan, "patient-lrtf").makespan <= 1.02 * plan.lower_bound


@pytest.mark.parametrize("mix", MIXES)
def test_sharded_lrtf_alike_where_moving_costs_nothing(mix: str) -> None:
    plan = plan_of(9, 4, mix)
    free = Plan(plan.tasks, plan.devices, float("inf"), float("inf"))
    assert simulate(free, "sharded-lrtf").makespan <= 1.05 * plan.lower_bound


def test_the_next_shard_is_loaded_while_the_present_one_computes() -> None:
    task_plan = task("a", 4, steps=3, resident=False, weights=10, gradients=0, optimizer=0, boundary=0, activations=0)
    roomy = simulate(Plan((task_plan,), {"d": 2 * task_plan.device_bytes}, 20.0, 20.0))
    first_load = 0.5
    assert roomy.makespan == pytest.approx(task_plan.seconds + first_load)
    tight_plan = Plan((task_plan,), {"d": task_plan.device_bytes}, 20.0, 20.0)
    tight = simulate(tight_plan)
    tight.validate(tight_plan)
    assert tight.makespan > roomy.makespan


@settings(deadline=None, max_examples=30)
@given(plans())
def test_measured_seconds_replace_estimates(plan: Plan) -> None:
    """Measurements of the same run reproduce its makespan; those of a slower run give a longer one."""
    policy = "fifo"
    timeline = simulate(plan, policy)
    assert simulate(plan, policy, timeline).makespan == pytest.approx(timeline.makespan)
    slow = [replace(span, start=3 * span.start, end=3 * span.end) for span in timeline.actions]
    again = simulate(plan, policy, replace(timeline, actions=tuple(slow)))
    assert again.makespan == pytest.approx(3 * timeline.makespan)


def test_to_begin_and_end_an_action_takes_time_too() -> None:
    task_plan = task("a", steps=3)
    plain = Plan((task_plan,), {"d": 10**9}, 1e9, 1e9)
    actions = [span for span in simulate(plain).actions if span.act.lane == "compute"]
    longer = simulate(replace(plain, action_seconds=0.5))
    assert longer.makespan == pytest.approx(simulate(plain).makespan + 0.5 * len(actions))


def test_the_next_shard_is_loaded_ahead_but_not_before_what_it_borrows() -> None:
    task_plan = task("a", 4, resident=False, weights=10)
    for borrows, before in (((), {0, 1}), ((0,), {0})):
        second = replace(task_plan.shards[1], borrows=borrows)
        shards = (task_plan.shards[0], second, *task_plan.shards[2:])
        plan = Plan((replace(task_plan, shards=shards),), {"d": 999}, 1e9, 1e9)
        timeline = simulate(plan)
        timeline.validate(plan)
        first = next(span for span in timeline.actions if span.act is Act.FORWARD)
        loads = [span for span in timeline.actions if span.act is Act.LOAD and span.start < first.end]
        assert {span.shard for span in loads} == before


def test_a_kept_shard_is_loaded_and_evicted_once_by_a_task_alone() -> None:
    task_plan = task("a", 3, steps=5, resident=False, kept=True, evaluated=1)
    plan = Plan((task_plan,), {"d": overlapped(task_plan)}, 0.5, 0.5)
    timeline = simulate(plan)
    timeline.validate(plan)
    moved = [(action.act, action.shard) for action in timeline.actions if action.act.lane != "compute"]
    assert [moved.count((kind, 2)) for kind in (Act.LOAD, Act.EVICT)] == [1, 1]
    assert moved.count((Act.LOAD, 1)) == 5 + 5 + 1
    other = simulate(Plan((replace(task_plan, keeps_last_shard=False),), plan.devices, 0.5, 0.5))
    assert timeline.makespan < other.makespan


def test_a_resident_task_alone_is_loaded_and_evicted_once() -> None:
    task_plan = task("a", steps=5)
    timeline = simulate(Plan((task_plan,), {"d": 1000}, 1.0, 1.0))
    assert [action.act for action in timeline.actions].count(Act.LOAD) == 1
    assert [action.act for action in timeline.actions].count(Act.EVICT) == 1
    assert timeline.peak == {"d": task_plan.device_bytes}


def test_resident_tasks_share_a_device_that_has_room_for_both() -> None:
    task_plans = (task("a", steps=9), task("b", steps=9))
    plan = Plan(task_plans, {"d": sum(task_plan.device_bytes for task_plan in task_plans)}, 1.0, 1.0)
    timeline = simulate(plan, COMPARED["round-robin"])
    timeline.validate(plan)
    assert [action.act for action in timeline.actions].count(Act.LOAD) == 2


def computed(**settings: Any) -> str:
    """The computations of a spilled task of two shards, as text: kind, shard, minibatch."""
    task_plan = task("a", 2, resident=False, **settings)
    actions = simulate(Plan((task_plan,), {"d": 99}, 1e9, 1e9)).actions
    return " ".join(f"{a.act[0]}{a.shard}{a.step}" for a in actions if a.act.lane == "compute")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"steps": 2}, "F00 F10 B10 S10 R00 B00 S00 F01 F11 B11 S11 R01 B01 S01"),
        ({"steps": 2, "accumulate": 2}, "F00 F10 B10 R00 B00 F01 F11 B11 S11 R01 B01 S01"),
        ({"steps": 2, "accumulate": 2, "epoch": 1}, "F00 F10 B10 S10 R00 B00 S00 F01 F11 B11 S11 R01 B01 S01"),
        ({"steps": 1, "clipped": True}, "F00 F10 B10 R00 B00 S00 S10"),
        ({"steps": 2, "clipped": True, "accumulate": 2}, "F00 F10 B10 R00 B00 F01 F11 B11 R01 B01 S01 S11"),
        ({"steps": 1, "evaluated": 2}, "F00 F10 B10 S10 R00 B00 S00 E00 E10 E01 E11"),
    ],
)
def test_the_optimizer_steps_when_its_gradients_are_there(settings: dict[str, Any], expected: str) -> None:
    assert computed(**settings) == expected


def test_a_clipped_spilled_task_as_text() -> None:
    task_plan = task("a", 1, resident=False, clipped=True, weights=4, frozen=2, optimizer=2, activations=3, workspace=0)
    plan = Plan((task_plan,), {"d": 9}, 4.0, 4.0)
    assert simulate(plan).text() == CLIPPED


CLIPPED = """\
timeline
lower_bound 6.25
devices d
0.0 1.25 LOAD d a 0 0 5
1.25 2.25 FORWARD d a 0 0 3
2.25 3.25 BACKWARD d a 0 0 4
3.25 3.5 EVICT d a 0 0 5
3.5 5.25 LOAD d a 0 0 7
5.25 6.25 STEP d a 0 0 0
6.25 7.25 EVICT d a 0 0 7"""


def test_frozen_weights_are_not_written_back() -> None:
    task_plan = task("a", steps=3, resident=False, weights=100, frozen=100, gradients=0, optimizer=0)
    timeline = simulate(Plan((task_plan,), {"d": 999}, 10.0, 10.0))
    (load,) = (action for action in timeline.actions if action.act is Act.LOAD)
    (evict,) = (action for action in timeline.actions if action.act is Act.EVICT)
    assert load.end - load.start == 10.0
    assert evict.end == evict.start == timeline.makespan


def test_a_task_runs_where_it_fits() -> None:
    large, small = task("large", weights=100), task("small")
    plan = Plan((large, small), {"little": 10, "big": 200}, 1e9, 1e9)
    where = {action.task: action.device for action in simulate(plan).actions}
    assert where == {"large": "big", "small": "little"}


def test_no_tasks_and_unknown_policy() -> None:
    empty = Plan((), {"d": 1}, 1.0, 1.0)
    assert simulate(empty).makespan == simulate(empty).lower_bound == 0.0
    with pytest.raises(PlanError, match="unknown policy 'best': choose from sharded-lrtf, patient-lrtf, fifo"):
        simulate(empty, "best")


POLICIES_THAT_BREAK_RULES: dict[str, Callable[[State], Any]] = {
    "gives None": lambda state: None,
    "gives a word": lambda state: "a",
    "gives another task": lambda state: (state.waiting.first(state.budget) or state.running)._replace(task=1),
    "takes it itself": lambda state: (state.waiting.first(state.budget), state.waiting.take(state.budget))[0],
}


@pytest.mark.parametrize("name", POLICIES_THAT_BREAK_RULES)
def test_a_policy_that_breaks_rules_is_refused(name: str) -> None:
    broken = Policy("mine", "", lambda candidate: 0.0, lambda order, state: POLICIES_THAT_BREAK_RULES[name](state))
    words = "the policy gave None to every device" if name == "gives None" else "policy 'mine' gave .*: it may give"
    with pytest.raises(PlanError, match=words):
        simulate(Plan((task("a"), task("b")), {"d": 999}, 1.0, 1.0), broken)


def test_arguments_of_other_types_are_refused() -> None:
    empty, wrong = Plan((), {"d": 1}, 1.0, 1.0), object()
    for arguments, words in (
        ((wrong,), "hf.simulate expects a plan, got object. Give what hf.plan"),
        ((empty, wrong), "unknown policy <object .* or give a Policy"),
        ((empty, "fifo", wrong), "measured must be a timeline, .* got object"),
    ):
        with pytest.raises(PlanError, match=words):
            simulate(*arguments)

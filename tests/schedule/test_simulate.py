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
from hfusion.schedule.engine import simulate
from hfusion.schedule.plan import Plan
from hfusion.schedule.policy import Policy, State
from tests.schedule.compared import COMPARED, MIXES, plan_of
from tests.shards import plans, task


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

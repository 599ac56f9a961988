"""The timeline: text, numbers, pictures, and that each broken rule is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfusion.core.errors import PlanError
from hfusion.schedule.actions import Act
from hfusion.schedule.engine import simulate
from hfusion.schedule.plan import Plan
from hfusion.schedule.policy import Policy, State
from hfusion.schedule.timeline import Span, Timeline, TimelineError
from tests.schedule.compared import COMPARED, MIXES, plan_of, plans, task

PLAN = Plan((task("a", steps=2), task("b", 2, steps=2, resident=False)), {"d": 25, "e": 20}, 1.0, 1.0)
LOAD, FORWARD, RECOMPUTE, BACKWARD, STEP, EVALUATE, EVICT, SAVE = Act


@settings(deadline=None, max_examples=50)
@given(plans())
def test_text_round_trips(plan: Plan) -> None:
    timeline = simulate(plan)
    assert Timeline.parse(timeline.text()) == timeline


WORDS = st.text("abc0123/:_-", min_size=1)
TIMES = st.floats(0, 1e300)


@given(st.builds(Span, st.sampled_from(Act), WORDS, st.integers(), st.integers(), WORDS, TIMES, TIMES, st.integers()))
def test_any_action_round_trips(action: Span) -> None:
    assert Span.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no timeline begins with ''"),
        ("timeline\nlower 1\ndevices d", "expected 'lower_bound SECONDS'"),
        ("timeline\nlower_bound 1.0\ndevices d\n0.0 1.0 JUMP d a 0 0 0", "cannot read the action"),
        ("timeline\nlower_bound 1.0\ndevices d\n0.0 LOAD d a 0 0 0", "cannot read the action"),
    ],
)
def test_text_that_is_no_timeline(text: str, message: str) -> None:
    with pytest.raises(TimelineError, match=message):
        Timeline.parse(text)


def test_numbers() -> None:
    actions = (
        Span(LOAD, "a", 0, 0, "d", 0.0, 1.0, 10),
        Span(FORWARD, "a", 0, 0, "d", 1.0, 2.0, 5),
        Span(BACKWARD, "a", 0, 0, "d", 2.0, 3.0, 7),
        Span(STEP, "a", 0, 0, "d", 3.0, 4.0, 0),
        Span(EVICT, "a", 0, 0, "d", 4.0, 9.0, 10),
    )
    timeline = Timeline(actions, ("d", "e"), 3.0)
    assert timeline.makespan == 4.0
    assert timeline.utilisation == pytest.approx(3 / 8)
    assert timeline.peak == {"d": 17, "e": 0}


def nth(kind: Act, number: int = 0) -> int:
    """The position of an action of task b, the spilled one."""
    positions = [n for n, action in enumerate(TIMELINE.actions) if action.act is kind and action.task == "b"]
    return positions[number]


TIMELINE = simulate(PLAN, "fifo")
Edit = Callable[[list[Span]], object]


def change(kind: Act, number: int = 0, **values: object) -> Edit:
    def edit(actions: list[Span]) -> None:
        index = nth(kind, number)
        actions[index] = replace(actions[index], **values)  # type: ignore[arg-type]

    return edit


def drop(kind: Act, number: int = 0) -> Edit:
    return lambda actions: actions.pop(nth(kind, number))


BROKEN: dict[str, tuple[Edit, str]] = {
    "unknown task": (change(LOAD, task="z"), "no such device, task or shard"),
    "unknown shard": (change(LOAD, shard=9), "no such device, task or shard"),
    "backwards": (change(FORWARD, end=-1.0), "time runs backwards"),
    "missing work": (drop(BACKWARD, -1), "should do the BACKWARD of shard 0 in step 1, not .* STEP"),
    "wrong order": (change(FORWARD, 1, shard=0), "should do the FORWARD of shard 1 in step 0, not"),
    "other minibatch": (change(STEP, 0, step=1), "should do the STEP of shard 1 in step 0, not"),
    "missing step": (drop(STEP, 0), "should do the STEP of shard 1 in step 0, not"),
    "missing last step": (drop(STEP, -1), "is not done: the STEP of shard 0 in step 1 is missing"),
    "step too many": (
        lambda actions: actions.append(actions[nth(STEP, -1)]),
        "its 8 units ran, but this comes: .* STEP",
    ),
    "two at a time": (change(FORWARD, 1, end=TIMELINE.makespan), "task 'b' runs twice at a time"),
    "not loaded": (drop(LOAD), "is not loaded"),
    "elsewhere": (change(FORWARD, device="d"), "is not loaded on 'd'"),
    "loaded twice": (lambda actions: actions.insert(nth(LOAD), actions[nth(LOAD)]), "already on a device"),
    "never evicted": (drop(EVICT, -1), "never evicted"),
    "other bytes": (change(EVICT, bytes=999), "took other bytes"),
    "too little": (change(LOAD, bytes=0), "took other bytes|holds less"),
    "too much": (change(FORWARD, bytes=1000), "its budget is 20"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name: str) -> None:
    edit, message = BROKEN[name]
    TIMELINE.validate(PLAN)
    actions = list(TIMELINE.actions)
    edit(actions)
    with pytest.raises(TimelineError, match=message):
        replace(TIMELINE, actions=tuple(actions)).validate(PLAN)


def test_the_step_of_a_clipped_task_needs_the_optimizer_state() -> None:
    plan = Plan((task("a", resident=False, clipped=True, optimizer=9),), {"d": 99}, 1.0, 1.0)
    timeline = simulate(plan)
    timeline.validate(plan)
    small = [replace(action, bytes=min(action.bytes, 5)) for action in timeline.actions]
    with pytest.raises(TimelineError, match=r"holds less than the 11 bytes that this needs: .* STEP"):
        replace(timeline, actions=tuple(small)).validate(plan)


def test_perfetto(tmp_path: Path) -> None:
    TIMELINE.perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == len(TIMELINE.actions)
    assert [event["ts"] for event in drawn] == [action.start * 1e6 for action in TIMELINE.actions]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"d", "e"}
    levels = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert max(levels) == TIMELINE.peak["d"]
    assert levels[-1] == 0


# The simulator: any plan and policy gives a valid timeline, near the lower bound where it must be.


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

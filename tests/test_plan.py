"""The vocabulary of shards: what is derived, what is refused, how it prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hfusion.errors import PlanError
from hfusion.plan import Direction, Plan, TaskPlan, Unit
from tests.shards import shard, task

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def test_derived_bytes_of_a_shard() -> None:
    part = shard(0, weights=1, gradients=2, optimizer=4, activations=8, workspace=16, boundary=32)
    assert part.load_bytes == 7
    assert part.resident_bytes == 47
    assert part.seconds == 3.0


def test_units_go_forward_ascending_and_backward_descending() -> None:
    made = task("a", count=2, steps=2)
    assert [made.unit(number) for number in range(made.units)] == [
        Unit("a", step, direction, index)
        for step in range(2)
        for direction, index in ((FORWARD, 0), (FORWARD, 1), (BACKWARD, 1), (BACKWARD, 0))
    ]


def test_a_resident_task_holds_all_shards_and_recomputes_nothing() -> None:
    made = task("a", count=3, steps=5, workspace=100)
    assert made.device_bytes == sum(part.resident_bytes for part in made.shards) + 100
    assert made.step_seconds == 9.0
    assert made.seconds == 45.0


def test_a_spilled_task_needs_its_largest_unit_and_recomputes_all_but_the_last() -> None:
    made = task("a", count=3, resident=False, weights=10, activations=7, workspace=100)
    middle_backward = (10 + 1 + 1) + 1 + 1 + 7 + 100
    assert made.device_bytes == middle_backward
    assert made.step_seconds == 9.0 + 2.0


def test_a_spilled_forward_needs_no_gradients_except_where_it_turns() -> None:
    made = task("a", count=2, resident=False, weights=10, gradients=1000)
    assert made.held_bytes(FORWARD, 0) == 10
    assert made.held_bytes(FORWARD, 1) == made.held_bytes(BACKWARD, 1) == 10 + 1000 + 1 + 1 + 1


def test_a_task_that_fits_no_device_names_the_smallest_budget() -> None:
    made = task("large", weights=1000)
    with pytest.raises(PlanError, match=r"'large'.*largest budget is 500.*budget that would do is 1,004 bytes"):
        Plan((made,), {"a": 500, "b": 20}, 1.0, 1.0)
    Plan((made,), {"a": 1004, "b": 20}, 1.0, 1.0)


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
    with pytest.raises(PlanError, match="begins at node 2, the one before ends at 1"):
        TaskPlan("a", (shard(0), replace(shard(1), first=2, last=3)), 1, True)


def test_lower_bound() -> None:
    assert Plan((task("a"), task("b", steps=9)), {"d": 99, "e": 99}, 1.0, 1.0).lower_bound == 27.0
    assert Plan((task("a"), task("b"), task("c")), {"d": 99, "e": 99}, 1.0, 1.0).lower_bound == 4.5


def test_print_and_draw(tmp_path: Path) -> None:
    plan = Plan((task("a"), task("b", 2, resident=False)), {"d": 2048}, 1024.0, 1.0)
    lines = str(plan).split("\n")
    assert lines[0] == "plan  2 tasks  1 devices: d 2.0KiB  (host to device 1.0KiB/s, back 1B/s)"
    assert [line.split()[:2] for line in lines[2:]] == [["a", "resident"], ["b", "spilled"]]
    plan.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")

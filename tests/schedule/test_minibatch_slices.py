"""Minibatches that are scheduled several at a time, and reported one by one."""

from __future__ import annotations

import pytest

from hfusion.schedule.actions import Act
from hfusion.schedule.minibatch_slices import Ran, Slices
from hfusion.schedule.plan import Phase, Plan, Shard, TaskPlan, Unit
from hfusion.schedule.simulate import simulate
from hfusion.schedule.timeline import Timeline

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
    ran: list[Ran] = []
    for span in simulated.actions:
        if span.act is Act.BACKWARD:
            count = slices.end(span.step) - slices.first(span.step)
            seconds = (span.end - span.start) / count
            begins = [span.start + index * seconds for index in range(count)]
            ran += [Ran(*(start + seconds * part / 5 for part in range(5))) for start in begins]
    saved = {
        span.step: (span.start + span.end) / 2
        for span in simulated.actions
        if span.act is Act.EVALUATE and whole.saves(Unit("one", span.step, Phase.EVALUATE, 0, False))
    }
    spans = sorted(slices.spans(simulated.actions, ran, 0, saved), key=lambda span: span.start)
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

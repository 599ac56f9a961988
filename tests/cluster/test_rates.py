"""Measured times of arrays are explained by factors of devices and tasks, of which some have ended."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfusion.cluster.rates import _ROUNDS, DIFFERS, Ratios


@pytest.mark.parametrize("forgets", [False, True])
def test_a_device_that_is_no_longer_slow(forgets: bool) -> None:
    """Twenty tasks took four times as long on the second device; forgotten arrays do not count."""
    tasks = [f"task {number}" for number in range(22)]
    ratios = Ratios(tasks)
    for number in range(20):
        ratios.note(number, 0, 1.0)
        ratios.note(number, 1, 4.0)
        if forgets:
            ratios.forget(number)
    slow = ratios.of_device(1) / ratios.of_device(0)
    assert slow == pytest.approx(4, rel=2 * DIFFERS)
    for number in (20, 21):
        assert ratios.factor(number, 1) / ratios.factor(number, 0) == pytest.approx(slow)
    for device in (0, 1):
        ratios.note(20, device, 1.0)
    ratio = ratios.factor(21, 1) / ratios.factor(21, 0)
    assert (ratio < 1.5) == forgets


class RecomputedRatios(Ratios):
    """The same ratios, computed from all measurements at each fit."""

    def _fit(self, device: int, task: str) -> None:
        on_device, on_task = self._on_device[device], self._on_task[task]
        for _ in range(_ROUNDS):
            device_mean = sum(value - self._of_task[name] for name, value in on_device.items()) / len(on_device)
            task_mean = sum(value - self._of_device[other] for other, value in on_task.items()) / len(on_task)
            self._of_device[device] += (device_mean - self._of_device[device]) / 2
            self._of_task[task] += (task_mean - self._of_task[task]) / 2

    def of_device(self, device: int) -> float:
        step = math.log1p(DIFFERS)
        return math.exp(round(self._of_device[device] / step) * step)


NOTES = st.tuples(st.integers(0, 5), st.integers(0, 3), st.floats(0.1, 10))


@given(st.lists(NOTES | st.integers(0, 5), max_size=40))
def test_kept_sums_are_those_of_all_that_was_measured(events: list[Any]) -> None:
    """Arrays of three tasks are measured on four devices, or are no more."""
    incremental, recomputed = (
        kind([f"task {number % 3}" for number in range(6)]) for kind in (Ratios, RecomputedRatios)
    )
    for event in events:
        for ratios in (incremental, recomputed):
            if isinstance(event, int):
                ratios.forget(event)
            else:
                ratios.note(*event)
    for device in range(4):
        assert incremental._of_device[device] == pytest.approx(recomputed._of_device[device], abs=1e-9)
        assert incremental.of_device(device) == pytest.approx(
            math.exp(incremental._of_device[device]), rel=DIFFERS / 2 + 1e-3
        )
    for number in range(6):
        assert incremental.of_array(number) == pytest.approx(recomputed.of_array(number), rel=DIFFERS + 1e-3)

"""What is measured of arrays is explained by devices and tasks, of which some are no more."""

from __future__ import annotations

import pytest

from hfusion.cluster.rates import DIFFERS, Ratios


@pytest.mark.parametrize("forgets", [False, True])
def test_a_device_that_is_no_longer_slow(forgets: bool) -> None:
    """Twenty tasks took four times as long on the second device; what is no more does not speak for it."""
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
    found = ratios.factor(21, 1) / ratios.factor(21, 0)
    assert (found < 1.5) == forgets

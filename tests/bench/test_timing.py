from __future__ import annotations

import pytest
import torch

from hfusion.bench import timing

CPU = torch.device("cpu")


def test_speedup_is_the_median_of_the_ratios_of_each_round() -> None:
    # The ratio of the medians would be 4.0 / 2.0.
    assert timing.speedup([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == 2.0
    assert timing.speedup([8.0, 2.0, 2.0], [2.0, 2.0, 4.0]) == 1.0


def test_speedup_needs_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="zip"):
        timing.speedup([1.0, 2.0], [1.0])


def test_spread_is_the_quartile_distance_over_the_median() -> None:
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.0 / 3.0)
    assert timing.spread([3.0]) == 0.0


def test_rounds_are_interleaved() -> None:
    order: list[str] = []
    ticks: list[int] = []
    steps = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    times = timing.interleave(steps, rounds=3, slot=1e-9, device=CPU, tick=lambda: ticks.append(1))
    # One call each to calibrate, then A B A B A B.
    assert order == ["a", "b"] + ["a", "b"] * 3
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    assert len(ticks) == 6


def test_calibrate_fills_the_slot() -> None:
    calls: list[int] = []
    count = timing.calibrate(lambda: calls.append(1), 1e-3, CPU)
    assert count > 1
    assert timing.calibrate(lambda: calls.append(1), 1e-12, CPU) == 1


def test_no_rounds() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 1, not 0"):
        timing.interleave({}, rounds=0, slot=1e-3, device=CPU, tick=lambda: None)

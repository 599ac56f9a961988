"""The choice between plain trials and an array, by estimates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hfusion.tune.trial_placement import seconds_saved


def saved(epochs: tuple[int, ...] = (10, 10, 10, 10), side_by_side: int = 1, member: float = 0.0) -> float:
    footprint: Any = SimpleNamespace(seconds=lambda rows: 1e-3 + rows * member, startup=0.5)
    return seconds_saved(epochs, 100, footprint, side_by_side)


def test_an_array_saves_the_overhead_of_its_members() -> None:
    assert saved() > 0
    # Arithmetic is saved by no array, and plain trials of different processes take less time together.
    assert saved(member=1e-2) < saved() - 1
    assert saved(side_by_side=4) < 0
    # Trials that end early save less.
    assert saved((10, 1, 1, 1)) < 0
    assert saved((1000, 1000), side_by_side=1) > saved((10, 10), side_by_side=1)


def test_an_array_has_to_make_up_for_its_start() -> None:
    assert saved((1, 1)) == pytest.approx(100 * 1e-3 * (2 - 1.9) - 0.5)

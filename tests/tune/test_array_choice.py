"""The choice between plain trials and an array by what plain ones take, and the change from plain to array."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from hfusion.tune.shape_array import seconds_saved
from hfusion.tune.trial_rows import TrialRows
from tests.tune import test_sweep

pytest.importorskip("optuna")


@pytest.fixture
def promoted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trials are plain until one of them has two epochs left; how many became an array each time."""
    counts: list[int] = []
    adopt = TrialRows.adopt

    def counted(rows: TrialRows, saved: Any, members: Any) -> None:
        counts.append(len(members))
        adopt(rows, saved, members)

    monkeypatch.setattr(TrialRows, "adopt", counted)
    monkeypatch.setattr(
        "hfusion.tune.shape_array.seconds_saved", lambda epochs, *args: math.inf if min(epochs) <= 2 else -math.inf
    )
    return counts


def saved(epochs: tuple[int, ...] = (10, 10, 10, 10), side_by_side: int = 1, plain: float | None = 1e-3) -> float:
    footprint: Any = SimpleNamespace(array_seconds=lambda rows, plain: 2e-3, startup=0.5)
    return seconds_saved(epochs, 100, plain, footprint, side_by_side)


def test_an_array_saves_what_its_steps_do_less_what_it_takes_to_begin() -> None:
    assert saved() == pytest.approx(100 * 1e-3 * (40 - 20) - 0.5)
    # Beside one another plain trials take less time; trials that end early save less.
    assert saved(side_by_side=2) == pytest.approx(-0.5)
    assert saved((10, 1, 1, 1)) == pytest.approx(100 * 1e-3 * (13 - 20) - 0.5)
    assert saved((10,), side_by_side=8) < 0
    # Plain trials are measured first.
    assert saved(plain=None) == -math.inf


@pytest.mark.parametrize(("pruner", "metric"), [("none", "steps"), ("median", "loss")])
def test_values_are_those_of_trials_alone(pruner: str, metric: str, promoted: list[int]) -> None:
    test_sweep.test_values_are_those_of_trials_alone(pruner, metric)
    assert max(promoted) > 1

"""The choice between plain trials and an array by what plain ones take, and the change from plain to array."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hfusion.tune.shape_array import ArrayChoice, seconds_saved
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
        "hfusion.tune.shape_array.seconds_saved", lambda choice: math.inf if min(choice.epochs) <= 2 else -math.inf
    )
    return counts


def choice(**changed: Any) -> ArrayChoice:
    numbers: dict[str, Any] = {"epochs": (10, 10, 10, 10), "minibatches": 100, "plain": 1e-3, "array": 2e-3}
    return ArrayChoice(**{**numbers, "startup": 0.5, "side_by_side": 1, **changed})


def test_an_array_saves_what_its_steps_do_less_what_it_takes_to_begin() -> None:
    assert seconds_saved(choice()) == pytest.approx(100 * 1e-3 * (40 - 20) - 0.5)
    # Beside one another plain trials take less time; trials that end early save less.
    assert seconds_saved(choice(side_by_side=2)) == pytest.approx(-0.5)
    assert seconds_saved(choice(epochs=(10, 1, 1, 1))) == pytest.approx(100 * 1e-3 * (13 - 20) - 0.5)
    assert seconds_saved(choice(epochs=(10,), side_by_side=8)) < 0


def test_plain_trials_are_measured_first_where_nothing_is_known() -> None:
    assert seconds_saved(choice(plain=None)) == -math.inf


@pytest.mark.parametrize(("pruner", "metric"), [("none", "steps"), ("median", "loss")])
def test_values_are_those_of_trials_alone(pruner: str, metric: str, promoted: list[int]) -> None:
    test_sweep.test_values_are_those_of_trials_alone(pruner, metric)
    assert max(promoted) > 1

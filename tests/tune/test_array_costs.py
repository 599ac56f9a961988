"""The choice between plain trials and an array, by times measured here, and the change from plain to array."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hfusion.tune.array_costs import _FIRST_FACTOR, _FIRST_STARTUP, ArrayCosts, ArrayRecord
from hfusion.tune.shape_array import ArrayChoice
from hfusion.tune.trial_rows import TrialRows
from tests.tune import test_sweep

pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def no_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


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


def test_records_replace_priors() -> None:
    costs = ArrayCosts(torch.device("cpu"))
    assert (costs.startup(5), costs.factor(5), costs.plain(5)) == (_FIRST_STARTUP, _FIRST_FACTOR, None)
    for startup in (0.2, 0.4, 0.6):
        costs.note(ArrayRecord(5, startup, 1.5, 0.9))
    again = ArrayCosts(torch.device("cpu"))
    assert (again.startup(5), again.factor(5), again.plain(5)) == (0.4, 0.9, 1.5)
    # A larger program takes longer in proportion.
    assert again.startup(50) == pytest.approx(4.0)


@pytest.mark.parametrize(("pruner", "metric"), [("none", "steps"), ("median", "loss")])
def test_values_are_those_of_trials_alone(pruner: str, metric: str, promoted: list[int]) -> None:
    test_sweep.test_values_are_those_of_trials_alone(pruner, metric)
    assert max(promoted) > 1

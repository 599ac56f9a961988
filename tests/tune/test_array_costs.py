"""What decides whether trials become an array: what was measured here; and how trials that were plain become one."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hfusion.tune.array_costs import _FIRST_RATIO, _FIRST_STARTUP, ArrayCosts, ArrayRecord
from hfusion.tune.shape_array import ArrayChoice, seconds_saved
from hfusion.tune.trial_rows import TrialRows
from tests.tune import chosen, test_sweep
from tests.tune.killed import at, everything, run
from tests.tune.test_objectives import Killed, kill

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
    numbers: dict[str, Any] = {"epochs": (10, 10, 10, 10), "minibatches": 100, "plain": 1e-3, "array": 2.0}
    return ArrayChoice(**{**numbers, "startup": 0.5, "side_by_side": 1, **changed})


def test_an_array_saves_what_its_steps_do_less_what_it_takes_to_begin() -> None:
    assert seconds_saved(choice()) == pytest.approx(100 * 1e-3 * (40 - 20) - 0.5)
    # Beside one another plain trials take less time; trials that end early save less.
    assert seconds_saved(choice(side_by_side=2)) == pytest.approx(-0.5)
    assert seconds_saved(choice(epochs=(10, 1, 1, 1))) == pytest.approx(100 * 1e-3 * (13 - 20) - 0.5)
    assert seconds_saved(choice(epochs=(10,), side_by_side=8)) < 0


def test_plain_trials_are_measured_first_where_nothing_is_known() -> None:
    assert seconds_saved(choice(plain=None)) == -math.inf


def test_records_replace_priors() -> None:
    costs = ArrayCosts(torch.device("cpu"))
    assert (costs.startup(5), costs.ratio(5), costs.plain(5)) == (_FIRST_STARTUP, _FIRST_RATIO, None)
    costs.note(ArrayRecord(5, 0.4, 1.5, 0.9))
    costs.note(ArrayRecord(50, 4.0, 1.5, 0.9))
    again = ArrayCosts(torch.device("cpu"))
    assert (again.ratio(5), again.plain(5)) == (0.9, 1.5)
    # Of both, the larger one in proportion.
    assert again.startup(50) == pytest.approx(4.0)
    assert again.startup(5) == pytest.approx((0.4 + 4.0) / 2)


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    costs = ArrayCosts(torch.device("cpu"))
    costs.note(ArrayRecord(5, 0.4, 1.5, 0.9))
    (path,) = (tmp_path / "hfusion").glob("trial-arrays-*")
    path.write_text(path.read_text().replace("0.4", '"much"'))
    assert ArrayCosts(torch.device("cpu")).startup(5) == _FIRST_STARTUP


def test_a_sweep_keeps_what_it_measures(promoted: list[int]) -> None:
    test_sweep.sweep(5)
    assert promoted
    costs = ArrayCosts(torch.device("cpu"))
    assert costs.plain(3) is not None
    assert costs.startup(3) != _FIRST_STARTUP


@pytest.mark.parametrize(("pruner", "metric"), [("none", "steps"), ("median", "loss")])
def test_values_are_those_of_trials_alone(pruner: str, metric: str, promoted: list[int]) -> None:
    test_sweep.test_values_are_those_of_trials_alone(pruner, metric)
    assert max(promoted) > 1


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_all_choices_at_once(interval: str, promoted: list[int]) -> None:
    assert chosen.largest_difference(chosen.search(12, scheduler_interval=interval), interval) < 1e-9
    assert promoted


def test_killed_and_resumed(tmp_path: Path, promoted: list[int]) -> None:
    whole = everything(run(str(tmp_path / "whole"), lambda place: None, "random"))
    for place, count in [("judged", 4), ("reported", 9), ("kept", 8)]:
        # Fewer are left each time.
        with suppress(Killed):
            run(str(tmp_path / "killed"), at(place, count, kill), "random")
    assert everything(run(str(tmp_path / "killed"), lambda place: None, "random")) == whole

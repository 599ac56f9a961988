"""The choice between plain trials and an array, by times measured here, and the change from plain to array."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hfusion.cluster.messages import DeviceInfo
from hfusion.tune.array_costs import _FIRST_FACTOR, _FIRST_STARTUP, ArrayCosts, ArrayRecord
from hfusion.tune.plain_trial_footprint import PlainFootprint
from hfusion.tune.shape_array import ArrayChoice, seconds_saved
from hfusion.tune.trial_rows import TrialRows
from tests.tune import chosen, test_sweep
from tests.tune.killed import at, everything, run
from tests.tune.test_footprint import RATES
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
    numbers: dict[str, Any] = {"epochs": (10, 10, 10, 10), "minibatches": 100, "plain": 1e-3, "array": 2e-3}
    return ArrayChoice(**{**numbers, "startup": 0.5, "side_by_side": 1, **changed})


def test_an_array_saves_what_its_steps_do_less_what_it_takes_to_begin() -> None:
    assert seconds_saved(choice()) == pytest.approx(100 * 1e-3 * (40 - 20) - 0.5)
    # Beside one another plain trials take less time; trials that end early save less.
    assert seconds_saved(choice(side_by_side=2)) == pytest.approx(-0.5)
    assert seconds_saved(choice(epochs=(10, 1, 1, 1))) == pytest.approx(100 * 1e-3 * (13 - 20) - 0.5)
    assert seconds_saved(choice(epochs=(10,), side_by_side=8)) < 0


def test_an_array_takes_once_what_plain_steps_take_besides_arithmetic() -> None:
    model, inputs = torch.nn.Linear(64, 64), torch.zeros(32, 64)
    device = DeviceInfo("cpu", torch.device("cpu"), 1 << 30, RATES, 0.0)
    look = PlainFootprint(model, 2, inputs, device, evaluated=0, saved=False)
    row = look.seconds(2) - look.seconds(1)
    assert look.array_seconds(1, 1e-3) == 1e-3
    assert look.array_seconds(9, 1e-3) == pytest.approx(1e-3 + 8 * row)
    # No row of an array is expected to take longer than a plain step.
    assert look.array_seconds(9, row / 2) == pytest.approx(9 * row / 2)


def test_plain_trials_are_measured_first_where_nothing_is_known() -> None:
    assert seconds_saved(choice(plain=None)) == -math.inf


def test_records_replace_priors() -> None:
    costs = ArrayCosts(torch.device("cpu"))
    assert (costs.startup(5), costs.factor(5), costs.plain(5)) == (_FIRST_STARTUP, _FIRST_FACTOR, None)
    for startup in (0.2, 0.4, 0.6):
        costs.note(ArrayRecord(5, startup, 1.5, 0.9))
    again = ArrayCosts(torch.device("cpu"))
    assert (again.startup(5), again.factor(5), again.plain(5)) == (0.4, 0.9, 1.5)
    # A larger program takes longer in proportion.
    assert again.startup(50) == pytest.approx(4.0)


def test_a_measurement_on_a_busy_machine_does_not_decide() -> None:
    costs = ArrayCosts(torch.device("cpu"))
    costs.note(ArrayRecord(5, 27.0, 14.8, 61.1))
    assert (costs.startup(5), costs.factor(5), costs.plain(5)) == (_FIRST_STARTUP, _FIRST_FACTOR, None)
    costs.note(ArrayRecord(5, 0.4, 1.5, 0.9))
    costs.note(ArrayRecord(5, 0.5, 1.6, 1.1))
    assert (costs.startup(5), costs.factor(5), costs.plain(5)) == (0.5, 1.1, 1.6)


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    costs = ArrayCosts(torch.device("cpu"))
    for _ in range(3):
        costs.note(ArrayRecord(5, 0.4, 1.5, 0.9))
    (path,) = (tmp_path / "hfusion").glob("trial-arrays-*")
    path.write_text(path.read_text().replace("0.4", '"much"'))
    assert ArrayCosts(torch.device("cpu")).startup(5) == _FIRST_STARTUP


def test_a_sweep_keeps_what_it_measures(promoted: list[int]) -> None:
    test_sweep.sweep(5)
    assert promoted
    costs = ArrayCosts(torch.device("cpu"))
    assert costs._records


@pytest.mark.parametrize(("pruner", "metric"), [("none", "steps"), ("median", "loss")])
def test_values_are_those_of_trials_alone(pruner: str, metric: str, promoted: list[int]) -> None:
    test_sweep.test_values_are_those_of_trials_alone(pruner, metric)
    assert max(promoted) > 1


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_all_choices_at_once(interval: str, promoted: list[int]) -> None:
    assert chosen.largest_difference(chosen.search(12, scheduler_interval=interval), interval) < 1e-9
    assert promoted


def test_killed_and_resumed(tmp_path: Path, promoted: list[int]) -> None:
    whole = everything(run(str(tmp_path / "whole"), lambda event: None, "random"))
    for event, count in [("judged", 4), ("reported", 9), ("kept", 8)]:
        # Fewer are left each time.
        with suppress(Killed):
            run(str(tmp_path / "killed"), at(event, count, kill), "random")
    assert everything(run(str(tmp_path / "killed"), lambda event: None, "random")) == whole

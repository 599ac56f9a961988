"""A quiet Optuna, and arrays of whatever size."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # So small sweeps would be plain torch.
    monkeypatch.setattr("hfusion.tune.trial_placement.seconds_saved", lambda *args: math.inf)
    optuna = pytest.importorskip("optuna")
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)

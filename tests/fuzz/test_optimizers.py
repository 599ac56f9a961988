"""Run a fixed set of random optimizers, see `tests.fuzz.optimizers`."""

from __future__ import annotations

import pytest

pytest.importorskip("optuna")
from tests.fuzz.optimizers import SCENES


@pytest.mark.parametrize("first", range(0, 20, 10))
@pytest.mark.parametrize("scene", SCENES)
def test_members_equal_themselves_alone(scene: str, first: int) -> None:
    for seed in range(first, first + 10):
        SCENES[scene](seed)

"""Each optimizer with one of the schedulers, and each scheduler with one of the optimizers; all of them: matrix.py."""

from __future__ import annotations

import pytest

from tests.optim.schedules import ALL
from tests.population.matrix import OPTIMIZERS, Pair, bound

PAIRS = [(name, [*ALL][index % len(ALL)]) for index, name in enumerate(OPTIMIZERS)]


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_a_pair_equals_torch_alone(optimizer: str, scheduler: str) -> None:
    assert {kind for _, kind in PAIRS} == ALL.keys()
    assert Pair(optimizer, scheduler).run() <= bound(optimizer)

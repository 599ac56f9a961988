"""Lives of populations at random equal torch alone; more of them: ``python -m tests.population.walk``."""

from __future__ import annotations

import pytest

from tests.population.walk import Walk


@pytest.mark.parametrize("seed", range(6))
def test_a_life_at_random(seed: int) -> None:
    Walk(seed, compile=False).run(20)


def test_a_compiled_life_at_random() -> None:
    Walk(7, compile=True).run(12)

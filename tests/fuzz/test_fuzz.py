"""A fixed set of random programs; and that the machine finds, shrinks and prints a rule that is wrong."""

from __future__ import annotations

import pytest

from tests.fuzz.compare import outcome
from tests.fuzz.generate import SMALL, generate

SEEDS = range(200)


@pytest.mark.parametrize("first", range(0, len(SEEDS), 10))
def test_fused_equals_alone(first: int) -> None:
    for seed in SEEDS[first : first + 10]:
        program = generate(seed, SMALL)
        found = outcome(program)
        assert not found.bad, f"{program.text()}\n{found.verdict}: {found.words}"

from __future__ import annotations

from hfusion.runtime.memory import Ledger


def test_only_what_is_free_can_be_taken() -> None:
    made = Ledger("d", 10)
    assert made.take(4)
    assert made.take(6)
    assert not made.take(1)
    made.give(6)
    assert made.take(1)
    assert made.take(0)
    assert (made.taken, made.peak) == (5, 10)
    assert not made.take(6)
    assert (made.taken, made.peak) == (5, 10)

from __future__ import annotations

from hfusion.runtime.memory import Ledger


def test_what_is_promised_is_for_nobody_else() -> None:
    made = Ledger("d", 10)
    assert made.take(5)
    assert made.take(3, later=4)
    assert not made.take(1)
    assert not made.redeem(4)
    made.give(5)
    assert not made.take(4)
    assert made.take(3)
    assert made.redeem(4)
    assert (made.taken, made.promised, made.peak) == (10, 0, 10)


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

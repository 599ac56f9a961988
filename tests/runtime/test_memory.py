from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Condition

import pytest

from hfusion.runtime.memory import Ledger, Stopped


def ledger(budget: int) -> Ledger:
    return Ledger("d", budget, Condition())


def test_what_is_taken_and_given() -> None:
    made = ledger(10)
    made.take(4)
    made.take(6)
    made.give(6)
    made.take(1)
    assert (made.taken, made.peak) == (5, 10)


def test_who_finds_no_room_waits_until_there_is_some() -> None:
    made = ledger(10)
    made.take(8)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made.take, 3)
        made.give(1)
        assert made.taken == 10 or not waiting.done()
        waiting.result()
    assert (made.taken, made.peak) == (10, 10)


def test_many_who_take_and_give_never_exceed_the_budget() -> None:
    made, start = ledger(7), Barrier(4)

    def work(size: int) -> None:
        start.wait()
        for _ in range(200):
            made.take(size)
            made.give(size)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [1, 3, 5, 7]))
    assert made.taken == 0
    assert 7 <= made.peak <= 7


@pytest.mark.parametrize("size", [3, 1, 0])
def test_who_waits_or_comes_after_the_end_is_stopped(size: int) -> None:
    made = ledger(10)
    made.take(9)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made.take, 3)
        made.close()
        with pytest.raises(Stopped):
            waiting.result()
    with pytest.raises(Stopped):
        made.take(size)
    made.give(9)
    assert made.taken == 0

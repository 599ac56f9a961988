from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest

from hfusion.runtime.process import Gate


def test_many_compute_at_a_time() -> None:
    gate, barrier = Gate(), Barrier(2)

    def compute() -> int:
        with gate.computing():
            return barrier.wait()

    with ThreadPoolExecutor(2) as pool:
        assert sorted(job.result() for job in [pool.submit(compute), pool.submit(compute)]) == [0, 1]


@pytest.mark.parametrize(
    ("first", "second"), [("computing", "exclusive"), ("exclusive", "computing"), ("exclusive", "exclusive")]
)
def test_an_exclusive_section_runs_alone(first: str, second: str) -> None:
    gate, inside, order = Gate(), Event(), []

    def enter() -> None:
        inside.wait()
        with getattr(gate, second)():
            order.append(second)

    with ThreadPoolExecutor(1) as pool:
        with getattr(gate, first)():
            job = pool.submit(enter)
            inside.set()
            # Were it to enter, nothing would keep it from doing so now.
            for _ in range(1000):
                assert not order
            order.append(first)
        job.result()
    assert order == [first, second]


@pytest.mark.parametrize("section", ["computing", "exclusive"])
def test_an_error_opens_the_gate_again(section: str) -> None:
    gate = Gate()
    for _ in range(2):
        with pytest.raises(ValueError, match="inside"), getattr(gate, section)():
            raise ValueError("inside")
    with gate.exclusive():
        pass

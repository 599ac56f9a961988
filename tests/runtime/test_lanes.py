from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from threading import Event

import pytest
import torch

from hfusion.runtime.copying import Move
from hfusion.runtime.lanes import Lanes
from hfusion.runtime.memory import Ledger

CPU = torch.device("cpu")


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes(Ledger("d", 10), CPU, torch.get_num_threads())
    yield made
    made.close()


def test_it_copies_while_it_computes(lanes: Lanes) -> None:
    assert lanes.name == "d"
    source, there, back = torch.randn(1 << 18), torch.zeros(1 << 18), torch.zeros(1 << 18)

    def job() -> None:
        lanes.into.submit([Move.of(there, source)]).wait()
        lanes.out.submit([Move.of(back, there)]).wait()

    lanes.compute(job)
    assert torch.equal(back, source)


def test_an_error_is_the_jobs_own(lanes: Lanes) -> None:
    def fail() -> None:
        raise ValueError("lane")

    with pytest.raises(ValueError, match="lane"):
        lanes.compute(fail)
    with pytest.raises(ValueError, match="lane"):
        lanes.later.submit(fail).result()


def test_it_computes_with_the_number_of_threads_it_was_given() -> None:
    before = torch.get_num_threads()
    found: list[int] = []
    other = Lanes(Ledger("e", 10), CPU, before + 1)
    try:
        other.compute(lambda: found.append(torch.get_num_threads()))
    finally:
        other.close()
        torch.set_num_threads(before)
    assert found == [before + 1]


def test_closing_waits_for_what_runs_and_drops_what_waits() -> None:
    begun, go = Event(), Event()
    done: list[str] = []

    def job() -> None:
        begun.set()
        go.wait()
        done.append("ran")

    before = threading.enumerate()
    other = Lanes(Ledger("e", 10), CPU, torch.get_num_threads())
    running = other.later.submit(job)
    waiting = other.later.submit(lambda: done.append("waited"))
    begun.wait()
    waiting.add_done_callback(lambda ended: go.set())
    source, target = torch.randn(1 << 20), torch.zeros(1 << 20)
    ticket = other.into.submit([Move.of(target, source)])
    other.close()
    assert done == ["ran"]
    assert running.done()
    assert ticket.done()
    assert torch.equal(target, source)
    with pytest.raises(CancelledError):
        waiting.result()
    assert set(threading.enumerate()) <= set(before)

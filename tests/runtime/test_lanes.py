from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from threading import Barrier, Condition, Event

import pytest
import torch

from hfusion.runtime.lanes import Lanes
from hfusion.runtime.memory import Ledger


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes(Ledger("d", 10, Condition()), torch.device("cpu"), torch.get_num_threads())
    yield made
    made.close()


def test_the_three_lanes_work_at_the_same_time(lanes: Lanes) -> None:
    assert lanes.name == "d"
    meet = Barrier(3)

    def job() -> None:
        meet.wait()

    futures = [lanes.into(job), lanes.out(job)]
    lanes.compute(job)
    for future in futures:
        future.result()


@pytest.mark.parametrize("way", ["into", "out"])
def test_a_lane_does_one_thing_after_the_other(lanes: Lanes, way: str) -> None:
    done: list[int] = []
    for future in [getattr(lanes, way)(lambda k=k: done.append(k)) for k in range(20)]:
        future.result()
    assert done == list(range(20))


def test_an_error_is_the_jobs_own(lanes: Lanes) -> None:
    def fail() -> None:
        raise ValueError("lane")

    with pytest.raises(ValueError, match="lane"):
        lanes.into(fail).result()
    with pytest.raises(ValueError, match="lane"):
        lanes.compute(fail)
    ran: list[int] = []
    lanes.into(lambda: ran.append(1)).result()
    assert ran == [1]


def test_all_lanes_compute_with_the_number_of_threads_they_were_given(lanes: Lanes) -> None:
    before = torch.get_num_threads()
    found: list[int] = []
    other = Lanes(Ledger("e", 10, Condition()), torch.device("cpu"), before + 1)
    try:
        for each in (lanes, other):
            each.into(lambda: found.append(torch.get_num_threads())).result()
            each.out(lambda: found.append(torch.get_num_threads())).result()
    finally:
        other.close()
        torch.set_num_threads(before)
    assert found == [before, before, before + 1, before + 1]


def test_closing_waits_for_what_runs_and_drops_what_waits(lanes: Lanes) -> None:
    begun, go = Event(), Event()
    done: list[str] = []

    def job() -> None:
        begun.set()
        go.wait()
        done.append("ran")

    before = threading.enumerate()
    other = Lanes(Ledger("e", 10, Condition()), torch.device("cpu"), torch.get_num_threads())
    running = other.into(job)
    waiting = other.into(lambda: done.append("waited"))
    begun.wait()
    waiting.add_done_callback(lambda ended: go.set())
    other.close()
    assert done == ["ran"]
    assert running.done()
    with pytest.raises(CancelledError):
        waiting.result()
    assert set(threading.enumerate()) <= set(before)

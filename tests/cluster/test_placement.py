"""Placing arrays: near the least that is possible, every array once, and none lost with a device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from hypothesis import given, settings
from hypothesis import strategies as st

from hfusion.cluster.driver import Placement


def simulated(
    seconds: Sequence[float], devices: int, factor: Callable[[int], float] = lambda device: 1.0
) -> tuple[float, list[list[int]]]:
    """Return when all arrays have ended, and those of each device. ``factor``: how much slower a device is."""
    placement, now = Placement(seconds, [1] * devices, 0), 0.0
    ends: list[tuple[float, int]] = []
    taken: list[list[int]] = [[] for _ in range(devices)]
    while not placement.over:
        for device, number in placement.starts():
            taken[device].append(number)
            heappush(ends, (now + factor(device) * seconds[number], device))
        now, device = heappop(ends)
        assert placement.end(device) == taken[device][-1]
    assert sorted(itertools.chain.from_iterable(taken)) == list(range(len(seconds)))
    return now, taken


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=50)
def test_longest_first_is_within_a_third_of_the_best(seconds: list[float], devices: int) -> None:
    best = min(
        max(sum(s for s, d in zip(seconds, where, strict=True) if d == device) for device in range(devices))
        for where in itertools.product(range(devices), repeat=len(seconds))
    )
    # Graham's bound.
    assert simulated(seconds, devices)[0] <= best * (4 / 3 - 1 / (3 * devices)) * (1 + 1e-9)


def test_a_slow_device_takes_less() -> None:
    """Nothing waits behind it: the idle one takes what is left."""
    end, taken = simulated([1.0] * 12, 2, lambda device: (1.0, 5.0)[device])
    assert [len(numbers) for numbers in taken] == [10, 2]
    assert end == 10


def test_an_array_that_exceeds_a_device_goes_to_a_larger_one() -> None:
    placement = Placement([5.0, 1.0], [10, 20], 0)
    assert list(placement.starts()) == [(0, 0), (1, 1)]
    assert placement.exceed(0)
    assert list(placement.starts()) == []
    assert placement.end(1) == 1
    assert list(placement.starts()) == [(1, 0)]
    assert not placement.exceed(1)
    assert placement.over


def test_the_arrays_of_a_task_that_is_divided_are_taken_too() -> None:
    placement = Placement([3.0, 2.0], [1, 1, 1], 0)
    assert list(placement.starts()) == [(0, 0), (1, 1)]
    assert placement.add(1.0) == 2
    assert list(placement.starts()) == [(2, 2)]


@given(st.randoms(use_true_random=False), st.integers(1, 25), st.integers(1, 4), st.booleans())
@settings(max_examples=100)
def test_every_array_ends_once_whatever_is_lost(draw: random.Random, arrays: int, devices: int, returns: bool) -> None:
    """Devices are lost at random, and what arrays really take is not what was estimated."""
    seconds, now = [draw.uniform(1, 5) for _ in range(arrays)], 0.0
    placement = Placement(seconds, [1] * devices, 2)
    ends: list[tuple[float, int]] = []
    done, given_up, lost = [], [], set[int]()
    while not placement.over:
        for device, number in placement.starts():
            assert device not in lost
            heappush(ends, (now + draw.uniform(0.5, 2) * seconds[number], device))
        now, device = heappop(ends)
        if draw.random() < 0.2:
            back = returns or len(lost) == devices - 1
            given_up += placement.lose(device, back=back)
            lost |= set() if back else {device}
        else:
            done.append(placement.end(device))
    assert sorted(done + given_up) == list(range(arrays))
    assert all(placement.failures[number] == 3 for number in given_up)


def test_the_last_device_takes_all_with_it() -> None:
    placement = Placement([1.0, 1.0, 1.0], [1, 1], 5)
    assert list(placement.starts()) == [(0, 0), (1, 1)]
    assert placement.lose(0, back=False) == []
    assert placement.stranded == []
    assert placement.lose(1, back=False) == []
    assert not placement.over
    assert list(placement.starts()) == []
    assert placement.give_up_stranded() == [0, 1, 2]
    assert placement.over


def test_a_device_that_joins_takes_what_waits_and_what_is_stranded() -> None:
    placement = Placement([1.0, 2.0, 4.0], [10], 5)
    assert list(placement.starts()) == [(0, 2)]
    placement.join(5)
    assert list(placement.starts()) == [(1, 1)]
    # The largest array needs the first device.
    assert placement.lose(0, back=False) == []
    assert placement.end(1) == 1
    assert list(placement.starts()) == [(1, 2)]
    assert not placement.exceed(1)
    assert list(placement.starts()) == [(1, 0)]

"""Placing arrays: near the least that is possible, every array once, and none lost with a device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfusion.cluster.placement import Load, Placement, lower_bound
from hfusion.core.errors import PlanError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def loads_of(seconds: Sequence[float], speeds: Sequence[float] = (1.0,)) -> list[Load]:
    return [Load(f"array{n}", tuple(estimate / speed for speed in speeds)) for n, estimate in enumerate(seconds)]


def simulated(
    loads: Sequence[Load], kinds: Sequence[int], factor: Callable[[int], float] = lambda device: 1.0
) -> tuple[float, list[list[int]]]:
    """Return when all arrays have ended, and those of each device. ``factor``: how much slower it is than estimated."""
    clock = Clock()
    placement = Placement(loads, kinds, 0, clock)
    ends: list[tuple[float, int]] = []
    taken: list[list[int]] = [[] for _ in kinds]
    while not placement.over:
        for device, number in placement.starts():
            taken[device].append(number)
            heappush(ends, (clock.now + factor(device) * (loads[number].seconds[kinds[device]] or 0.0), device))
        clock.now, device = heappop(ends)
        assert placement.end(device) == taken[device][-1]
    assert sorted(itertools.chain.from_iterable(taken)) == list(range(len(loads)))
    return clock.now, taken


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=50)
def test_longest_first_is_within_a_third_of_the_best(seconds: list[float], devices: int) -> None:
    loads, kinds = loads_of(seconds), [0] * devices
    best = min(
        max(sum(s for s, d in zip(seconds, where, strict=True) if d == device) for device in range(devices))
        for where in itertools.product(range(devices), repeat=len(seconds))
    )
    assert lower_bound(loads, kinds) <= best * (1 + 1e-9)
    # Graham's bound.
    assert simulated(loads, kinds)[0] <= best * (4 / 3 - 1 / (3 * devices)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        pytest.param((2.5, 1.0), [9, 3], id="less than half as fast"),
        pytest.param((50.0, 1.0), [12, 0], id="too slow to be of use"),
    ],
)
def test_a_slow_device_takes_only_what_does_not_delay_the_run(speeds: tuple[float, float], expected: list[int]) -> None:
    _, taken = simulated(loads_of([1.0] * 12, speeds), [0, 1])
    assert [len(numbers) for numbers in taken] == expected


def test_a_device_slower_than_estimated_takes_less() -> None:
    """Nothing waits behind it: the idle one takes what is left."""
    end, taken = simulated(loads_of([1.0] * 12), [0, 0], lambda device: (1.0, 5.0)[device])
    assert [len(numbers) for numbers in taken] == [10, 2]
    assert end == 10


def test_an_array_goes_to_a_device_that_it_fits() -> None:
    loads = [Load("small", (1.0, 1.0)), Load("large", (None, 5.0))]
    assert simulated(loads, [0, 1])[1] == [[0], [1]]
    with pytest.raises(PlanError, match="'huge' fits no device of the cluster"):
        Placement([Load("huge", (None,))], [0], 0, lambda: 0.0)


@given(st.randoms(use_true_random=False), st.integers(1, 25), st.integers(1, 4), st.booleans())
@settings(max_examples=100)
def test_every_array_ends_once_whatever_is_lost(draw: random.Random, arrays: int, devices: int, returns: bool) -> None:
    """Devices are lost at random, of two kinds, and what arrays really take is not what was estimated."""
    clock = Clock()
    loads = loads_of([draw.uniform(1, 5) for _ in range(arrays)], speeds=(2.0, 1.0))
    kinds = [draw.randrange(2) for _ in range(devices)]
    placement = Placement(loads, kinds, 2, clock)
    ends: list[tuple[float, int]] = []
    done, given_up, lost = [], [], set[int]()
    while not placement.over:
        for device, number in placement.starts():
            assert device not in lost
            heappush(ends, (clock.now + draw.uniform(0.5, 2) * (loads[number].seconds[kinds[device]] or 0), device))
        clock.now, device = heappop(ends)
        if draw.random() < 0.2:
            back = returns or len(lost) == devices - 1
            given_up += placement.lose(device, back=back)
            lost |= set() if back else {device}
        else:
            done.append(placement.end(device))
    assert sorted(done + given_up) == list(range(arrays))
    assert all(placement.failures[number] == 3 for number in given_up)


def test_the_last_device_takes_all_with_it() -> None:
    placement = Placement(loads_of([1.0, 1.0, 1.0]), [0, 0], 5, lambda: 0.0)
    assert list(placement.starts()) == [(0, 0), (1, 1)]
    assert placement.lose(0, back=False) == []
    assert placement.lose(1, back=False) == []
    assert not placement.over
    assert list(placement.starts()) == []
    assert placement.give_up_stranded() == [0, 1, 2]
    assert placement.over


def test_a_device_that_joins_takes_what_waits_and_what_is_stranded() -> None:
    loads = [Load("small", (1.0,)), Load("small too", (2.0,)), Load("large", (4.0,))]
    placement = Placement(loads, [0], 5, lambda: 0.0)
    assert list(placement.starts()) == [(0, 2)]
    # Of a new kind, which the large one does not fit.
    placement.join(1, [0.5, 1.0, None])
    assert list(placement.starts()) == [(1, 1)]
    assert placement.lose(0, back=False) == []
    assert placement.stranded == [2]
    placement.join(0)
    assert list(placement.starts()) == [(2, 2)]
    assert placement.end(1) == 1
    assert list(placement.starts()) == [(1, 0)]

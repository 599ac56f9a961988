"""Placing arrays: near the least that is possible, every array once, and none lost with a device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfusion.cluster.longest_first import Load, lower_bound, place_arrays
from hfusion.cluster.placement import Placement
from hfusion.core.errors import PlanError


def loads_of(seconds: Sequence[float], speeds: Sequence[float] = (1.0,)) -> list[Load]:
    return [
        Load(f"array{n}", tuple(estimate / speed for speed in speeds), f"task{n}", 100)
        for n, estimate in enumerate(seconds)
    ]


def placed(
    loads: Sequence[Load], waiting: Iterable[int], kinds: Sequence[int], busy: Sequence[float | None]
) -> list[list[int]]:
    return place_arrays(loads, dict.fromkeys(waiting, 1.0), kinds, busy, [1.0] * len(kinds))


def makespan(where: list[list[int]], loads: Sequence[Load], kinds: Sequence[int]) -> float:
    return max(
        sum(loads[n].seconds[kind] or 0.0 for n in assigned) for assigned, kind in zip(where, kinds, strict=True)
    )


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=50)
def test_longest_first_is_within_a_third_of_the_best(seconds: list[float], devices: int) -> None:
    loads, kinds = loads_of(seconds), [0] * devices
    assignment = placed(loads, range(len(loads)), kinds, [0.0] * devices)
    assert sorted(itertools.chain.from_iterable(assignment)) == list(range(len(loads)))
    best = min(
        max(sum(s for s, d in zip(seconds, where, strict=True) if d == device) for device in range(devices))
        for where in itertools.product(range(devices), repeat=len(seconds))
    )
    assert lower_bound(loads, kinds) <= best * (1 + 1e-9)
    # Graham's bound.
    assert makespan(assignment, loads, kinds) <= best * (4 / 3 - 1 / (3 * devices)) * (1 + 1e-9)


def test_an_array_goes_to_a_device_that_it_fits() -> None:
    loads = [Load("small", (1.0, 1.0), "a", 1), Load("large", (None, 5.0), "b", 1)]
    assert placed(loads, [0, 1], [0, 1], [0.0, 0.0]) == [[0], [1]]
    with pytest.raises(PlanError, match="'large' fits none of the devices that are left"):
        placed(loads, [0, 1], [0, 1], [0.0, None])
    with pytest.raises(PlanError, match="'huge' fits no device of the cluster"):
        Placement([Load("huge", (None,), "c", 1)], [0], 0, lambda: 0.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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
        candidates = placement.to_ask()
        for device in candidates:
            number = placement.start_next(device)
            if number is not None:
                heappush(ends, (clock.now + draw.uniform(0.5, 2) * (loads[number].seconds[kinds[device]] or 0), device))
        # A device that is not a candidate finds nothing, also if it looks on its own.
        placement._fruitless.clear()
        assert all(placement.start_next(device) is None for device in set(placement.idle).difference(candidates))
        clock.now, device = heappop(ends)
        if draw.random() < 0.2:
            back = returns or len(lost) == devices - 1
            given_up += placement.lose(device, back=back)
            lost |= set() if back else {device}
        else:
            done.append(placement.end(device))
    assert sorted(done + given_up) == list(range(arrays))
    assert all(placement.failures[number] == 3 for number in given_up)
    assert lost.isdisjoint(placement.idle)


def test_the_last_device_takes_all_with_it() -> None:
    placement = Placement(loads_of([1.0, 1.0, 1.0]), [0, 0], 5, lambda: 0.0)
    assert (placement.start_next(0), placement.start_next(1)) == (0, 1)
    assert placement.lose(0, back=False) == []
    assert placement.lose(1, back=False) == []
    assert not placement.over
    assert placement.idle == []
    assert placement.give_up_stranded() == [0, 1, 2]
    assert placement.over


def test_a_device_that_joins_takes_what_waits_and_what_is_stranded() -> None:
    loads = [Load("small", (1.0,), "a", 1), Load("small too", (2.0,), "a", 1), Load("large", (4.0,), "b", 1)]
    placement = Placement(loads, [0], 5, lambda: 0.0)
    assert placement.start_next(0) == 2
    # Of a new kind, which the large one does not fit.
    placement.join(1, [0.5, 1.0, None])
    assert placement.to_ask() == [1]
    assert placement.start_next(1) == 1
    assert placement.lose(0, back=False) == []
    assert placement.stranded == [2]
    placement.join(0)
    assert placement.to_ask() == [2]
    assert placement.start_next(2) == 2
    assert placement.end(1) == 1
    assert placement.start_next(1) == 0


def test_a_device_without_work_takes_what_waits_for_another() -> None:
    clock = Clock()
    placement = Placement(loads_of([4.0, 3.0, 2.0, 1.0]), [0, 0], 0, clock)
    # 4 and 1 here, 3 and 2 there.
    assert [placement.start_next(0), placement.start_next(1)] == [0, 1]
    clock.now = 1.0
    assert placement.end(1) == 1
    assert placement.start_next(1) == 2
    clock.now = 1.5
    assert placement.end(1) == 2
    assert placement.start_next(1) == 3
    assert placement.end(0) == 0
    assert placement.start_next(0) is None

"""Cuts that let the next shard be loaded: the best of all ways to cut, found by trying them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfusion.device.calibrate import Rates
from hfusion.passes.cost.cost import Line, OperatorCost, Storage, Weight
from hfusion.passes.partition.prefetch import (
    _MAX_PLACES,
    _UNIT_CALLS,
    Partition,
    SegmentCost,
    costs,
    prefetch_partition,
)
from hfusion.passes.partition.segments import Segments
from hfusion.passes.partition.shard import _between
from hfusion.schedule.plan import Phase, TaskPlan
from tests.lines import crossing, lines

RATES = Rates(flops=1.0, memory=9.0, load=2.0, evict=3.0, read=1.0, write=1.0, calls=1000.0)
HUGE = 2**50


def cost_of(plain: Line, pieces: list[SegmentCost], cuts: tuple[int, ...], budget: int) -> float | None:
    """What a way to cut costs, by definition; None if it does not let every shard be loaded."""
    if not all(b.follows(a, budget) for a, b in pairwise(pieces)):
        return None
    moved = sum(crossing(plain, place) for place in cuts) * (1 / RATES.load + 1 / RATES.evict)
    waits = sum(b.waits(a, budget) for a, b in pairwise(pieces))
    return moved + waits + len(cuts) * 2 * _UNIT_CALLS / RATES.calls


def step_of(pieces: list[SegmentCost], *, kept: bool) -> float:
    """Seconds of a minibatch's computing and copies, whichever take longer: all but the last come and go twice."""
    *before, last = pieces
    compute = sum(piece.forward + piece.backward for piece in before) + last.backward
    loads = sum(piece.loads + piece.reloads for piece in before) + (0.0 if kept else last.loads)
    leaves = sum(piece.leaves for piece in before) + (0.0 if kept else last.leaves)
    return max(compute, loads, leaves)


def pieces_of(segments: Segments, cuts: tuple[int, ...], budget: int) -> list[SegmentCost] | None:
    """The shards of a way to cut, if each fits."""
    found = []
    for first, last in pairwise((0, *cuts, segments.count)):
        piece = next(iter(costs(segments, first, {last}, budget, RATES)), None)
        if piece is None:
            return None
        found.append(piece)
    return found


def best_of_all(segments: Segments, budget: int) -> tuple[float, float] | None:
    """The cheapest way to cut that keeps nothing: its cost, and the seconds of a minibatch."""
    best = None
    for number in range(segments.count):
        for cuts in combinations(range(1, segments.count), number):
            pieces = pieces_of(segments, cuts, budget)
            cost = None if pieces is None else cost_of(segments.line, pieces, cuts, budget)
            if pieces is not None and cost is not None and (best is None or cost < best[0]):
                best = cost, cost + (step_of(pieces, kept=False) if cuts else 0.0)
    return best


def best_kept(segments: Segments, budget: int) -> list[tuple[float, float]]:
    """For every place where a shard that is kept may begin the cheapest way to cut: its cost, and seconds."""
    found = []
    for start in range(1, segments.count):
        best = None
        for number in range(start):
            for some in combinations(range(1, start), number):
                cuts = (*some, start)
                pieces = pieces_of(segments, cuts, budget)
                if pieces is None:
                    continue
                left = budget - pieces[-1].state
                pieces[-1] = pieces[-1].staying()
                cost = cost_of(segments.line, pieces, cuts, left)
                fits = all(piece.bytes <= left for piece in pieces)
                if fits and cost is not None and (best is None or cost < best[0]):
                    best = cost, cost + step_of(pieces, kept=True)
        found += [] if best is None else [best]
    return found


@given(lines(), st.integers(0, 200), st.sampled_from([0, 2]), st.booleans())
def test_the_cut_is_the_best_of_all(plain: Line, budget: int, state: float, carried: bool) -> None:
    segments = Segments(plain, state, carried)
    best = best_of_all(segments, budget)
    found = prefetch_partition(segments, budget, RATES)
    assert (found is None) == (best is None)
    if found is None or best is None:
        return
    pieces = pieces_of(segments, found.cuts, budget)
    assert pieces is not None
    if found.kept:
        assert found.cuts
        assert found.seconds == pytest.approx(min(seconds for _, seconds in best_kept(segments, budget)))
        assert found.seconds <= best[1] * (1 + 1e-9)
    else:
        assert cost_of(plain, pieces, found.cuts, budget) == pytest.approx(best[0])


@given(lines(), st.integers(0, 200), st.booleans())
def test_what_is_kept_fits_beside_the_shards_that_come_and_go(plain: Line, budget: int, carried: bool) -> None:
    segments = Segments(plain, 2, carried)
    found = prefetch_partition(segments, budget, RATES)
    if found is None or not found.kept:
        return
    pieces = pieces_of(segments, found.cuts, budget)
    assert pieces is not None
    left = budget - pieces[-1].state
    coming = [*pieces[:-1], pieces[-1].staying()]
    assert all(piece.bytes <= left for piece in coming)
    assert all(b.follows(a, left) for a, b in pairwise(coming))


@given(lines(), st.sampled_from([0, 2]), st.booleans(), st.data())
def test_the_bytes_are_those_of_the_plan(plain: Line, state: float, carried: bool, data: st.DataObject) -> None:
    segments = Segments(plain, state, carried)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, max(1, segments.count - 1)))) - {segments.count}))
    pieces = pieces_of(segments, cuts, HUGE)
    assert pieces is not None
    plan = TaskPlan("t", _between(segments, cuts, RATES), 2, resident=False, accumulate=1 + carried, kept=True)
    last = len(plan.shards) - 1
    for index, piece in enumerate(pieces[:-1]):
        forward, backward = (plan.turns[way, index] for way in (Phase.FORWARD, Phase.BACKWARD))
        assert (piece.forward_held, piece.held) == (forward.evict.frees, backward.evict.frees)
        assert piece.forward_bytes == forward.evict.frees + forward.extra
        assert piece.bytes == max(backward.evict.frees + backward.extra, piece.forward_bytes)
    assert pieces[-1].state == plan.host_bytes(last)
    turning = (plan.turns[way, last].extra for way in (Phase.FORWARD, Phase.BACKWARD))
    assert pieces[-1].staying().bytes == max(turning)
    whole = replace(plan, kept=False)
    assert max(piece.bytes for piece in pieces) == whole.device_bytes


def layers(count: int, weight: int, compute: float) -> Segments:
    """Equal layers one after the other."""
    steps = tuple(OperatorCost(f"s{k}", compute, 2 * compute) for k in range(count))
    values = tuple(Storage(1, k, k + 1) for k in range(count - 1))
    return Segments(Line(steps, values, tuple(Weight(weight, (k,)) for k in range(count))), 2)


def test_what_fits_whole_is_not_cut() -> None:
    assert prefetch_partition(layers(9, 100, 1.0), HUGE, RATES) == Partition((), False, 0.0)


def test_room_for_the_next_shard_is_left() -> None:
    """A layer takes 404 bytes at most while it segments, and 302 while it waits."""
    found = prefetch_partition(layers(4, 100, 1e3), 706, RATES)
    assert found is not None
    assert found.cuts == (1, 2, 3)
    assert not found.kept
    assert prefetch_partition(layers(4, 100, 1e3), 705, RATES) is None


def test_where_there_is_room_the_last_layers_are_kept() -> None:
    """Copies take most of the time: of 3 layers more than come and go at once, all stay."""
    found = prefetch_partition(layers(8, 100, 1.0), 706 + 3 * 300, RATES)
    assert found is not None
    assert found.kept
    assert found.cuts == (1, 2, 3, 4, 5)


def test_of_many_places_those_with_few_bytes_are_tried() -> None:
    """Of each two neighbouring places the second one is good."""
    count = 2 * _MAX_PLACES
    steps = tuple(OperatorCost(f"s{k}", 1e3, 2e3) for k in range(count))
    values = [Storage(1, k, k + 1) for k in range(count - 1)] + [Storage(9, k, k + 1) for k in range(0, count, 2)]
    segments = Segments(Line(steps, tuple(values), tuple(Weight(100, (k,)) for k in range(count))), 2)
    found = prefetch_partition(segments, 20_000, RATES)
    assert found is not None
    assert {segments.alive[place] for place in found.cuts} == {min(segments.alive[1:-1])}
    tight = prefetch_partition(segments, 780, RATES)
    assert tight is not None
    assert tight.cuts == tuple(range(1, count))

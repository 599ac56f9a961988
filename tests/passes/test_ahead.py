"""Cuts that let the next shard be loaded: the best of all ways to cut, found by trying them."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfusion.machine import Rates
from hfusion.passes.ahead import _MOST_PLACES, _UNIT_CALLS, _Piece, _pieces, cut_ahead
from hfusion.passes.cost import Line, Step, Storage, Weight
from hfusion.passes.runs import Runs
from tests.lines import crossing, lines

RATES = Rates(flops=1.0, memory=9.0, load=2.0, evict=3.0, read=1.0, write=1.0, calls=1000.0)
HUGE = 2**50


def seconds(plain: Line, pieces: list[_Piece], cuts: tuple[int, ...], budget: int) -> float | None:
    """What a way to cut costs, by definition; None if it does not let every shard be loaded."""
    if not all(b.follows(a, budget) for a, b in pairwise(pieces)):
        return None
    moved = sum(crossing(plain, place) for place in cuts) * (1 / RATES.load + 1 / RATES.evict)
    waits = sum(b.waits(a, budget) for a, b in pairwise(pieces))
    return moved + waits + len(cuts) * 2 * _UNIT_CALLS / RATES.calls


def pieces_of(runs: Runs, cuts: tuple[int, ...], budget: int) -> list[_Piece] | None:
    """The shards of a way to cut, if each fits."""
    found = []
    for first, last in pairwise((0, *cuts, runs.count)):
        piece = next((piece for piece in _pieces(runs, first, budget, RATES) if piece.last == last), None)
        if piece is None:
            return None
        found.append(piece)
    return found


@given(lines(), st.integers(0, 200), st.sampled_from([0, 2]), st.booleans())
def test_the_cut_is_the_best_of_all(plain: Line, budget: int, state: float, carried: bool) -> None:
    runs = Runs(plain, state, carried)
    best = None
    for number in range(runs.count):
        for cuts in combinations(range(1, runs.count), number):
            pieces = pieces_of(runs, cuts, budget)
            cost = None if pieces is None else seconds(plain, pieces, cuts, budget)
            best = cost if best is None or (cost is not None and cost < best) else best
    found = cut_ahead(runs, budget, RATES)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        pieces = pieces_of(runs, found, budget)
        assert pieces is not None
        assert seconds(plain, pieces, found, budget) == pytest.approx(best)


def layers(count: int, weight: int, compute: float) -> Runs:
    """Equal layers one after the other."""
    steps = tuple(Step(f"s{k}", compute, 2 * compute) for k in range(count))
    values = tuple(Storage(1, k, k + 1) for k in range(count - 1))
    return Runs(Line(steps, values, tuple(Weight(weight, (k,)) for k in range(count))), 2)


def test_what_fits_whole_is_not_cut() -> None:
    assert cut_ahead(layers(9, 100, 1.0), HUGE, RATES) == ()


def test_room_for_the_next_shard_is_left() -> None:
    """A layer takes 404 bytes at most while it runs, and 302 while it waits."""
    assert cut_ahead(layers(4, 100, 1e3), 706, RATES) == (1, 2, 3)
    assert cut_ahead(layers(4, 100, 1e3), 705, RATES) is None


def test_of_many_places_those_with_few_bytes_are_tried() -> None:
    """Of each two neighbouring places the second one is good."""
    count = 2 * _MOST_PLACES
    steps = tuple(Step(f"s{k}", 1e3, 2e3) for k in range(count))
    values = [Storage(1, k, k + 1) for k in range(count - 1)] + [Storage(9, k, k + 1) for k in range(0, count, 2)]
    runs = Runs(Line(steps, tuple(values), tuple(Weight(100, (k,)) for k in range(count))), 2)
    cuts = cut_ahead(runs, 20_000, RATES)
    assert cuts is not None
    assert {runs.alive[place] for place in cuts} == {min(runs.alive[1:-1])}
    assert cut_ahead(runs, 780, RATES) == tuple(range(1, count))

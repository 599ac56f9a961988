"""Choosing cuts: the chosen partition fits, and no other candidate takes fewer seconds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from hfusion.device.calibrate import Rates
from hfusion.passes.cost.cost import Line, OperatorCost, Storage, Weight
from hfusion.passes.partition.cut_shards import Partition, _between, _seconds, choose_cuts, cut
from hfusion.passes.partition.segments import Segments
from hfusion.schedule.plan import Shard, TaskPlan
from tests.lines import lines

RATES = Rates(flops=1.0, memory=9.0, load=2.0, evict=3.0, read=1.0, write=1.0, calls=1000.0)


def shards(segments: Segments, cuts: Sequence[int]) -> tuple[Shard, ...]:
    return _between(segments, cuts, RATES)


def chosen(segments: Segments, budget: int, *, keep: bool = True) -> Partition | None:
    return choose_cuts(segments, budget, RATES, partial(shards, segments), keep=keep)


def seconds(segments: Segments, partition: Partition, budget: int) -> float:
    return _seconds(shards(segments, partition.cuts), partition.keeps_last, budget, RATES, carried=segments.carried)


@given(lines(), st.integers(0, 200), st.sampled_from([0, 2]), st.booleans(), st.booleans())
def test_the_chosen_cuts_fit_and_beat_the_fewest_bytes(
    plain: Line, budget: int, state: float, carried: bool, keep: bool
) -> None:
    segments = Segments(plain, state, carried)
    partition, fewest = chosen(segments, budget, keep=keep), cut(segments, budget)
    if partition is None:
        assert fewest is None
        return
    plan = TaskPlan(
        "t", shards(segments, partition.cuts), 2, False, accumulate=1 + carried, keeps_last_shard=partition.keeps_last
    )
    assert plan.device_bytes <= budget
    assert keep or not partition.keeps_last
    if fewest is not None:
        assert seconds(segments, partition, budget) <= seconds(segments, Partition(fewest, False), budget)


@given(lines(), st.integers(20, 200))
def test_near_the_best_of_all_ways(plain: Line, budget: int) -> None:
    segments = Segments(plain, 2)
    partition = chosen(segments, budget)
    if partition is None:
        return
    places = range(1, segments.count)
    candidates = [
        Partition(cuts, keeps_last)
        for number in range(segments.count)
        for cuts in combinations(places, number)
        for keeps_last in (False, True)
    ]
    best = min(seconds(segments, candidate, budget) for candidate in candidates)
    assert seconds(segments, partition, budget) <= 1.5 * best


def layers(count: int, weight: int, compute: float) -> Segments:
    """Equal layers one after the other."""
    steps = tuple(OperatorCost(f"s{k}", compute, 2 * compute) for k in range(count))
    values = tuple(Storage(1, k, k + 1) for k in range(count - 1))
    return Segments(Line(steps, values, tuple(Weight(weight, (k,)) for k in range(count))), 2)


def test_nothing_fits() -> None:
    assert chosen(layers(3, 100, 1.0), 300) is None

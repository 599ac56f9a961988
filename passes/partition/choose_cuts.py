"""Choose where to cut a line: the candidate with the fewest seconds in a simulation by the engine.

Few and large shards cut where the fewest bytes are alive, which is best where links are slow; smaller ones leave room
to load the next shard next to the one that runs. If the budget leaves room, the last shard is kept on the device, and
only those before it are loaded and evicted: a kept shard never moves, and the last shard recomputes nothing.

Every way to cut the line into runs of steps is a path; dynamic programming finds the one with the fewest bytes alive at
its cuts in O(n^2), and stops to extend a run as soon as it outgrows the budget (as Jia et al., "Beyond Data and Model
Parallelism", arXiv:1807.05358, and Hydra's partitioner, arXiv:2110.08633, cut sequences). A storage that is alive at
several cuts counts at each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hfusion.device.calibrate import Rates
from hfusion.passes.partition.segments import Segments
from hfusion.schedule.lower import host_bytes
from hfusion.schedule.plan import Plan, Shard, TaskPlan
from hfusion.schedule.simulate import simulate

# Fractions of the budget for which cuts are computed as candidates.
_PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
_PARTS_BESIDE = (1.0, 0.7, 0.5)
# Largest number of positions considered for cuts: the time grows with its third power.
_MAX_PLACES = 128
# Largest number of positions considered for the beginning of a kept shard.
_MAX_KEPT = 8
# Rounds in which the best cuts are tried with one cut more or less, and how many positions a new cut may have.
_ROUNDS = 3
_MAX_MORE = 12
# Number of minibatches that are simulated.
_STEPS = 3


class Partition(NamedTuple):
    """The positions of the cuts, ascending, and whether the last shard is kept on the device."""

    cuts: tuple[int, ...]
    keeps_last: bool


_Shards = Callable[[Sequence[int]], tuple[Shard, ...]]


def choose_cuts(segments: Segments, budget: int, rates: Rates, shards: _Shards, *, keep: bool) -> Partition | None:
    """Return the best cuts, None if none fit. ``shards`` makes shards from cuts; ``keep``: the last may be kept."""

    def seconds(partition: Partition) -> float:
        return _seconds(shards(partition.cuts), partition.keeps_last, budget, rates, carried=segments.carried)

    cost = {partition: seconds(partition) for partition in dict.fromkeys(_partitions(segments, budget, shards, keep))}
    if not cost or min(cost.values()) == math.inf:
        cuts = cut(segments, budget)
        return None if cuts is None else Partition(cuts, False)
    best = min(cost, key=cost.__getitem__)
    more = _fewest(segments, range(1, segments.count), _MAX_MORE)
    for _ in range(_ROUNDS):
        before = best
        cost |= {partition: seconds(partition) for partition in _neighbours(best, more) if partition not in cost}
        best = min(cost, key=cost.__getitem__)
        if best == before:
            break
    return best


def cut(segments: Segments, budget: int) -> tuple[int, ...] | None:
    """Return the cuts with the fewest bytes alive for which every run fits ``budget``; None if there are none."""
    end = segments.count
    return fewest_alive(segments.alive, range(end), _running(segments, budget), end, budget)


def _partitions(segments: Segments, budget: int, shards: _Shards, keep: bool) -> Iterator[Partition]:
    end = segments.count
    few = _fewest(segments, range(1, end), _MAX_PLACES)
    running, ends = _running(segments, budget), {*few, end}
    runs = {first: [run for run in running(first) if run[0] in ends] for first in (0, *few)}

    def cuttings(end: int, budget: int, parts: Iterable[float]) -> Iterator[tuple[int, ...]]:
        candidates = (fewest_alive(segments.alive, runs, runs.__getitem__, end, round(part * budget)) for part in parts)
        return (cuts for cuts in candidates if cuts is not None)

    for cuts in cuttings(end, budget, _PARTS):
        yield Partition(cuts, False)
    if not keep:
        return
    yield Partition((), True)
    for start in _fewest(segments, [first for first in few if any(last == end for last, _ in runs[first])], _MAX_KEPT):
        remaining_budget = budget - host_bytes(shards((start,))[-1], carried=segments.carried)
        for cuts in cuttings(start, remaining_budget, _PARTS_BESIDE):
            yield Partition((*cuts, start), True)


def _neighbours(partition: Partition, more: Sequence[int]) -> Iterator[Partition]:
    """Yield variations of ``partition`` with one more cut, at a position in ``more``, or with one cut less."""
    for position in more:
        if position not in partition.cuts:
            yield Partition(tuple(sorted((*partition.cuts, position))), partition.keeps_last)
    for position in partition.cuts:
        yield Partition(tuple(other for other in partition.cuts if other != position), partition.keeps_last)


def _running(segments: Segments, budget: int) -> Callable[[int], Iterator[tuple[int, int]]]:
    """Return a function that yields the end and the bytes needed of each run from a position that fits ``budget``."""

    def running(first: int) -> Iterator[tuple[int, int]]:
        for run in segments.starting(first):
            if run.floor + segments.alive[first] > budget:
                break
            if (need := segments.need(first, run)) <= budget:
                yield run.last, need

    return running


def fewest_alive(
    alive: Sequence[int],
    places: Iterable[int],
    running: Callable[[int], Iterable[tuple[int, int]]],
    end: int,
    budget: int,
) -> tuple[int, ...] | None:
    """Return the cuts, among ``places`` before ``end``, with the fewest bytes alive; of equal ones the fewest cuts.

    Returns None if no cuts make all shards fit the budget. ``running``: the result of `_running`.
    """
    best, came = {0: (0, 0)}, dict[int, int]()
    for first in places:
        if first not in best or first >= end:
            continue
        reached = best[first][0] + alive[first], best[first][1] + 1
        if end in best and reached >= best[end]:
            continue
        for last, need in running(first):
            if need <= budget and last <= end and (last not in best or reached < best[last]):
                best[last], came[last] = reached, first
    return None if end not in best else on_the_way(came.__getitem__, end)


def on_the_way(before: Callable[[int], int], end: int) -> tuple[int, ...]:
    """Return the cuts that lead to ``end``, ascending. ``before`` maps each cut to the previous one, or to 0."""
    cuts = list[int]()
    while end := before(end):
        cuts.append(end)
    return tuple(reversed(cuts))


def _fewest(segments: Segments, places: Sequence[int], most: int) -> list[int]:
    """Return at most ``most`` of ``places``: of each group of neighbours, the place with the fewest bytes alive."""
    size = max(1, math.ceil(len(places) / most))
    groups = (places[start : start + size] for start in range(0, len(places), size))
    return [min(group, key=segments.alive.__getitem__) for group in groups]


def _seconds(shards: tuple[Shard, ...], keep: bool, budget: int, rates: Rates, *, carried: bool) -> float:
    """Simulate the seconds of some minibatches; infinite if the shards do not fit ``budget``."""
    sums = 2 if carried else 1
    task = TaskPlan("task", shards, _STEPS * sums, resident=False, accumulate=sums, keeps_last_shard=keep)
    if task.device_bytes > budget:
        return math.inf
    plan = Plan((task,), {"device": budget}, rates.load, rates.evict, rates.action_seconds)
    return simulate(plan).makespan

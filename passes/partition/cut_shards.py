"""Cut a program into shards that fit a budget: Program -> shards of a plan.

Operators stay in the order in which they were captured: the gradients of a value are summed in the order of its users.
For parallel branches another order would leave fewer bytes alive at the cuts (greedy by the bytes each operator
allocates and frees, from the front and from the back: 5 to 20% fewer for blocks of Inception and for two towers). At
the cuts that plans of a U-Net and a DenseNet choose, no order that was tried leaves fewer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from hfusion.core.errors import PlanError
from hfusion.core.program import Program
from hfusion.device.calibrate import Rates
from hfusion.passes.cost.cost import line
from hfusion.passes.cost.flops import SymbolSizes
from hfusion.passes.partition.segments import Segment, Segments
from hfusion.schedule.engine import simulate
from hfusion.schedule.lower import host_bytes
from hfusion.schedule.plan import Plan, Shard, TaskPlan


@dataclass(frozen=True)
class Sharding:
    """The shards of a program, in order; ``keeps_last``: the last one stays on the device, which has room for it."""

    shards: tuple[Shard, ...]
    keeps_last: bool


def sharding(
    program: Program,
    batch: SymbolSizes,
    budget: int,
    rates: Rates,
    optimizer_state: float = 2,
    *,
    carried: bool = False,
    keep: bool = True,
) -> Sharding:
    """Cut ``program`` into shards that each train within ``budget`` bytes, alone or next to a shard that is kept.

    The cuts take the fewest estimated seconds, see `choose_cuts`.

    Args:
        batch: the sizes of a minibatch: the number of samples, or `symbol_sizes`.
        budget: bytes of the device for weights, gradients, optimizer state, activations, both cuts, workspace.
        rates: of the device, for the seconds.
        optimizer_state: values the optimizer keeps per trained value, of its dtype: SGD 0, with momentum 1, Adam 2.
        carried: gradients outlive their backward, and fresh ones are added to them.
        keep: the last shard may stay on the device.

    Raises:
        PlanError: a bad argument; or no cut fits, which says the smallest budget that would do and which node needs it.
    """
    segments = _segments(program, batch, rates, optimizer_state, carried=carried)
    partition = choose_cuts(segments, budget, rates, partial(_between, segments, rates=rates), keep=keep)
    if partition is None:
        smallest, first, last = tightest(segments)
        node = max(range(first, last), key=segments.single_step_bytes)
        run, values = _segment(segments, first, last), segments.alive[first] + segments.alive[last]
        raise PlanError(
            f"program {program.name}: no cut into shards fits {budget:,} bytes; the smallest budget that would do is "
            f"{smallest:,} bytes, which node {segments.line.steps[node].where} needs: weights {run.weights:,}, "
            f"optimizer {run.optimizer:,}, values at its cuts {values:,}, and {run.peak:,} for gradients, activations "
            "and temporaries; give more memory, fewer samples or fewer members"
        )
    return Sharding(_between(segments, partition.cuts, rates), partition.keeps_last)


def shards_at(
    program: Program, cuts: Sequence[int], batch: SymbolSizes, rates: Rates, optimizer_state: float = 2
) -> tuple[Shard, ...]:
    """The shards of ``program`` cut before the operators numbered ``cuts``, whatever they need; else as `sharding`.

    Raises:
        PlanError: a bad argument, or cuts that do not ascend inside the program.
    """
    segments = _segments(program, batch, rates, optimizer_state)
    if any(a >= b for a, b in pairwise([0, *cuts, segments.count])):
        raise PlanError(f"program {program.name}: cuts {list(cuts)} must ascend between 1 and {segments.count - 1}")
    return _between(segments, cuts, rates)


def growth(program: Program, batch: SymbolSizes, larger: SymbolSizes, rates: Rates) -> float:
    """Return how many times the bytes for the sizes ``batch`` any value takes for ``larger`` ones; at least 1."""
    if larger == batch:
        return 1.0
    sizes = []
    for samples in (batch, larger):
        costs = line(program, samples, rates)
        # The bytes of every value, and those of every operator in addition to its operands and result.
        sizes.append([value.size for value in costs.storages] + [step.saved + step.workspace for step in costs.steps])
    return float(max([1.0, *(more / size for size, more in zip(*sizes, strict=True) if size)]))


def _segments(
    program: Program, batch: SymbolSizes, rates: Rates, optimizer_state: float, *, carried: bool = False
) -> Segments:
    if (isinstance(batch, int) and batch < 1) or not optimizer_state >= 0:
        raise PlanError(f"batch is {batch}, optimizer_state {optimizer_state}: give at least 1 sample and 0 values")
    costs = line(program, batch, rates)
    if not costs.steps:
        raise PlanError(f"program {program.name} holds no operator: there is nothing to shard")
    return Segments(costs, optimizer_state, carried)


def _between(segments: Segments, cuts: Sequence[int], rates: Rates) -> tuple[Shard, ...]:
    places = [0, *cuts, segments.count]
    # For each shard the earlier ones that are the first to use one of its weights.
    owners: list[set[int]] = [set() for _ in places[1:]]
    for weight in segments.line.weights:
        users = sorted({bisect_right(places, use) - 1 for use in weight.uses})
        for user in users[1:]:
            owners[user].add(users[0])
    shards = []
    for number, (first, last) in enumerate(pairwise(places)):
        shard = segments.shard(number, first, _segment(segments, first, last), rates)
        shards.append(replace(shard, borrows=tuple(sorted(owners[number]))))
    return tuple(shards)


def tightest(segments: Segments) -> tuple[int, int, int]:
    """The smallest budget that some cut fits, and the run ``[first, last)`` that needs it."""
    bound = max(map(segments.single_step_bytes, range(segments.count)))
    best = [0, *[bound] * segments.count]
    came = [0, *range(segments.count)]
    for first in range(segments.count):
        for run in segments.starting(first):
            if max(best[first], run.floor + segments.alive[first]) > bound:
                break
            reached = max(best[first], segments.need(first, run))
            if reached < best[run.last]:
                best[run.last], came[run.last] = reached, first
    places = [0, *on_the_way(came.__getitem__, segments.count), segments.count]
    worst = max(pairwise(places), key=lambda ends: segments.need(ends[0], _segment(segments, *ends)))
    return best[-1], *worst


def _segment(segments: Segments, first: int, last: int) -> Segment:
    return next(run for run in segments.starting(first) if run.last == last)


# Choose where to cut a line: the candidate with the fewest seconds in a simulation by the engine.

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

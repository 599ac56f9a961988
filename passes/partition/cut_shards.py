"""Cut a program into shards that fit a budget: Program -> shards of a plan.

Operators stay in the order in which they were captured: the gradients of a value are summed in the order of its users.
For parallel branches another order would leave fewer bytes alive at the cuts (greedy by the bytes each operator
allocates and frees, from the front and from the back: 5 to 20% fewer for blocks of Inception and for two towers). At
the cuts that plans of a U-Net and a DenseNet choose, no order that was tried leaves fewer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from hfusion.core.errors import PlanError
from hfusion.core.program import Program
from hfusion.device.calibrate import Rates
from hfusion.passes.cost.cost import Line, line
from hfusion.passes.cost.flops import SymbolSizes
from hfusion.passes.partition.choose_cuts import choose_cuts, on_the_way
from hfusion.passes.partition.segments import Segment, Segments
from hfusion.schedule.plan import Shard


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
        raise PlanError(_infeasible(program.name, segments, budget))
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
    sizes = zip(*(_sizes(line(program, samples, rates)) for samples in (batch, larger)), strict=True)
    return float(max([1.0, *(more / size for size, more in sizes if size)]))


def _sizes(costs: Line) -> list[int]:
    """Return the bytes of every value, and those of every operator in addition to its operands and result."""
    return [storage.size for storage in costs.storages] + [step.saved + step.workspace for step in costs.steps]


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
    parts = [_shard(segments, number, *ends, rates) for number, ends in enumerate(pairwise(places))]
    owners = _borrowed(segments, places)
    return tuple(replace(part, borrows=part_owners) for part, part_owners in zip(parts, owners, strict=True))


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


def _shard(segments: Segments, number: int, first: int, last: int, rates: Rates) -> Shard:
    steps = segments.line.steps[first:last]
    forward, backward = sum(step.forward for step in steps), sum(step.backward for step in steps)
    return segments.shard(number, first, _segment(segments, first, last), forward, backward, rates)


def _borrowed(segments: Segments, places: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each shard the earlier ones that are the first to use one of its weights."""
    owners: list[set[int]] = [set() for _ in places[1:]]
    for weight in segments.line.weights:
        users = sorted({bisect_right(places, use) - 1 for use in weight.uses})
        for user in users[1:]:
            owners[user].add(users[0])
    return [tuple(sorted(first)) for first in owners]


def _infeasible(name: str, segments: Segments, budget: int) -> str:
    smallest, first, last = tightest(segments)
    node = max(range(first, last), key=segments.single_step_bytes)
    run = _segment(segments, first, last)
    cuts = segments.alive[first] + segments.alive[last]
    return (
        f"program {name}: no cut into shards fits {budget:,} bytes; the smallest budget that would do is "
        f"{smallest:,} bytes, which node {segments.line.steps[node].where} needs: weights {run.weights:,}, optimizer "
        f"{run.optimizer:,}, values at its cuts {cuts:,}, and {run.peak:,} for gradients, activations and temporaries; "
        "give more memory, fewer samples or fewer members"
    )

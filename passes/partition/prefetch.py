"""Cut a line so that, while one shard runs, the next can be loaded beside it: Line -> cuts.

Which segments may follow one another depends on both, so the dynamic program goes over segments, not over places; what
a segment takes and moves as a shard is what `lower` says. The best partition costs the fewest seconds: what moving
takes that is alive at its cuts, beginning and ending its units, and waits for copies, were only the next shard loaded
ahead: a short unit gives no time to load a large shard.

Where the budget leaves room, the last shard is kept on the device, and only those before it come and go: what is kept
moves never, and of all shards the last one is the one that recomputes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from hfusion.device.calibrate import Rates
from hfusion.passes.partition.segments import Segments
from hfusion.schedule.actions import Act
from hfusion.schedule.lower import Spilled, host_bytes, levels, lower
from hfusion.schedule.shards import Shard

# To begin and end a unit takes as long as so many calls of operators; where a call takes 3 us, it took 0.15 to 0.2 ms.
_UNIT_CALLS = 60
# Beyond so many places to cut, those where most is alive are left out: the time grows with their third power.
_MAX_PLACES = 128
# At so many places the shard that is kept may begin; each is another dynamic program.
_MAX_KEPT = 16


class SegmentCost(NamedTuple):
    """A segment up to ``last`` as a shard: bytes, and seconds.

    ``forward_bytes``, ``forward_held``: while it runs forward, and when it is loaded for that; ``bytes``, ``held``: as
    these, of its backward; ``state``: what stays, were it kept. ``forward``, ``backward`` compute; ``loads``,
    ``reloads`` copy for them, ``leaves`` writes back what changed.
    """

    last: int
    bytes: int
    held: int
    forward_bytes: int
    forward_held: int
    state: int
    forward: float
    backward: float
    loads: float
    reloads: float
    leaves: float

    def follows(self, before: SegmentCost, budget: int) -> bool:
        """Whether the next one can be loaded both while ``before`` runs forward and while this runs backward."""
        return self.bytes + before.held <= budget and before.forward_bytes + self.forward_held <= budget

    def waits(self, before: SegmentCost, budget: int) -> float:
        """Seconds for which computing waits between the two; also for this to leave, if ``before`` needs its room."""
        leaves = self.leaves if before.bytes + self.held > budget else 0.0
        return leaves + max(0.0, self.loads - before.forward) + max(0.0, before.reloads - self.backward)

    def staying(self) -> SegmentCost:
        """The same beside what is kept of it: it takes what it computes with, and never moves."""
        return self._replace(bytes=self.bytes - self.state, held=0, forward_held=0, loads=0.0, leaves=0.0)


_Costs: TypeAlias = Mapping[int, Sequence[SegmentCost]]


class _CutPath(NamedTuple):
    """The best way to cut that ends with ``piece``, which begins at ``first`` and follows ``before``."""

    cost: float
    first: int
    piece: SegmentCost
    before: _CutPath | None


class Partition(NamedTuple):
    """Where to cut, ascending; whether the last shard is kept on the device; estimated seconds of a minibatch."""

    cuts: tuple[int, ...]
    kept: bool
    seconds: float


def prefetch_partition(segments: Segments, budget: int, rates: Rates, *, keep: bool = True) -> Partition | None:
    """The best way to cut; None if none lets every shard be loaded while the one before it segments.

    ``keep``: the last shard may be kept.
    """
    whole = [*segments.starting(0)][-1]
    if segments.need(0, whole) <= budget:
        return Partition((), False, 0.0)
    few = _fewest(segments, range(1, segments.count), _MAX_PLACES)
    found = _best(segments, [*few, segments.count], budget, rates, keep)
    if found is None and len(few) + 1 < segments.count:
        found = _best(segments, range(1, segments.count + 1), budget, rates, keep)
    return found


def _fewest(segments: Segments, places: Sequence[int], most: int) -> list[int]:
    """At ``most`` so many of ``places``: of neighbouring ones that where the fewest bytes are alive."""
    size = max(1, math.ceil(len(places) / most))
    groups = (places[start : start + size] for start in range(0, len(places), size))
    return [min(group, key=segments.alive.__getitem__) for group in groups]


def _best(segments: Segments, places: Sequence[int], budget: int, rates: Rates, keep: bool) -> Partition | None:
    """The best way to cut at some of ``places``, of which the last is the end."""
    pieces = {first: costs(segments, first, places, budget, rates) for first in (0, *places[:-1])}
    found = [
        _way(segments, pieces, budget, rates, kept=False),
        *(_keeping(segments, pieces, budget, rates) if keep else ()),
    ]
    return min((way for way in found if way is not None), key=_seconds, default=None)


def _keeping(segments: Segments, pieces: _Costs, budget: int, rates: Rates) -> Iterator[Partition | None]:
    """The best ways to cut that keep the last shard, each in what it leaves of the budget."""
    ends = {first: found[-1] for first, found in pieces.items() if first and found and found[-1].last == segments.count}
    for start in _fewest(segments, list(ends), _MAX_KEPT):
        before = {first: [p for p in found if p.last <= start] for first, found in pieces.items() if first < start}
        yield _way(segments, before | {start: [ends[start].staying()]}, budget - ends[start].state, rates, kept=True)


def _way(segments: Segments, pieces: _Costs, budget: int, rates: Rates, *, kept: bool) -> Partition | None:
    """The best way to cut into some of ``pieces``, of which a shorter one always comes first."""
    units = 2 * _UNIT_CALLS / rates.calls
    ends: dict[int, list[_CutPath]] = {place: [] for place in (*pieces, segments.count)}
    for first, found in pieces.items():
        cost = units + segments.alive[first] * (1 / rates.load + 1 / rates.evict)
        # The cheapest first: what costs more than a way that was found need not be looked at.
        ends[first].sort(key=_cost)
        for piece in found:
            if piece.bytes > budget or piece.last not in ends:
                continue
            path = _CutPath(0.0, 0, piece, None) if not first else _continued(ends[first], cost, first, piece, budget)
            if path is not None:
                ends[piece.last].append(path)
    last = ends[segments.count]
    if not last:
        return None
    best = min(last, key=_cost)
    return Partition(_cuts(best), kept, _total(best))


def _total(path: _CutPath) -> float:
    """Estimated seconds of a minibatch: computing and copying beside one another, and what a way to cut costs."""
    compute, loads, leaves = path.piece.backward, path.piece.loads, path.piece.leaves
    before = path.before
    while before is not None:
        piece = before.piece
        compute += piece.forward + piece.backward
        loads += piece.loads + piece.reloads
        leaves += piece.leaves
        before = before.before
    return max(compute, loads, leaves) + path.cost


def _seconds(way: Partition) -> float:
    return way.seconds


def _cost(path: _CutPath) -> float:
    return path.cost


def _continued(paths: list[_CutPath], cost: float, first: int, piece: SegmentCost, budget: int) -> _CutPath | None:
    """The cheapest way to cut, of some that are sorted, with ``piece`` after it, whose cut costs so many seconds."""
    best: _CutPath | None = None
    for path in paths:
        if best is not None and path.cost + cost >= best.cost:
            break
        if piece.follows(path.piece, budget):
            seconds = path.cost + cost + piece.waits(path.piece, budget)
            if best is None or seconds < best.cost:
                best = _CutPath(seconds, first, piece, path)
    return best


def costs(segments: Segments, first: int, places: Collection[int], budget: int, rates: Rates) -> list[SegmentCost]:
    """The segments from ``first`` to some of ``places`` that fit."""
    found = []
    steps = segments.line.steps[first:]
    forwards, backwards = (accumulate(getattr(step, way) for step in steps) for way in ("forward", "backward"))
    ends = frozenset(places)
    for segment, forward, backward in zip(segments.starting(first), forwards, backwards, strict=True):
        if segment.floor + segments.alive[first] > budget:
            break
        if segment.last in ends and segments.need(first, segment) <= budget:
            found.append(_cost_of(segments, segments.shard(0, first, segment, forward, backward, rates), rates))
    return found


def _cost_of(segments: Segments, shard: Shard, rates: Rates) -> SegmentCost:
    """What `lower` says of a shard with those before and after it: one list has its forward, and its backward."""
    ends = shard.last == segments.count
    entry = segments.alive[shard.first]
    actions = lower((shard,), Spilled(), accumulate=segments.carried, entry=entry, ends=ends)
    loads = [place for place, action in enumerate(actions) if action.act is Act.LOAD]
    on_device = levels(actions)
    forward, backward = actions[loads[0]], actions[loads[-1]]
    computing = [sum(action.seconds for action in actions[: loads[-1]]), sum(a.seconds for a in actions[loads[-1] :])]
    return SegmentCost(
        shard.last,
        max(on_device),
        backward.takes,
        max(on_device[: loads[-1] or None]),
        forward.takes,
        host_bytes(shard, carried=segments.carried),
        computing[0],
        computing[1],
        forward.moves / rates.load,
        backward.moves / rates.load,
        actions[-1].moves / rates.evict,
    )


def _cuts(path: _CutPath) -> tuple[int, ...]:
    """The cuts of a way, ascending."""
    cuts = []
    while path.before is not None:
        cuts.append(path.first)
        path = path.before
    return tuple(reversed(cuts))

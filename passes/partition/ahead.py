"""Cut a line so that, while one shard runs, the next can be loaded beside it: Line -> cuts.

Which runs may follow one another depends on both, so the dynamic program goes over runs, not over places. The best way
to cut costs the fewest seconds: what moving takes that is alive at its cuts, beginning and ending its units, and waits
for copies, were only the next shard loaded ahead: a short unit gives no time to load a large shard.

Where the budget leaves room, the last shard is kept on the device, and only those before it come and go: what is kept
moves never, and of all shards the last one is the one that recomputes nothing. (A cyclic scan is cached best by keeping
a part of it: Belady, IBM Systems Journal 5(2), 1966.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from hfusion.device.calibrate import Rates
from hfusion.passes.partition.runs import Runs

# To begin and end a unit takes as long as so many calls of operators; where a call takes 3 us, it took 0.15 to 0.2 ms.
_UNIT_CALLS = 60
# Beyond so many places to cut, those where most is alive are left out: the time grows with their third power.
_MOST_PLACES = 128
# At so many places the shard that is kept may begin; each is another dynamic program.
_MOST_KEPT = 16


class _Piece(NamedTuple):
    """A run as a shard: bytes, and seconds.

    ``runs``, ``held``: while it runs backward, and when it is loaded for that; ``begins``: while it recomputes, with
    which its backward begins; ``runs_forward``, ``held_forward``: as the first two, of its forward; ``weights``: what
    leaves first; ``state``: what stays, were it kept. ``forward``, ``backward`` compute; ``loads``, ``reloads`` copy
    for them, ``leaves`` writes back what changed, ``changes`` the weights of it.
    """

    last: int
    runs: int
    held: int
    begins: int
    runs_forward: int
    held_forward: int
    weights: int
    state: int
    forward: float
    backward: float
    loads: float
    reloads: float
    changes: float
    leaves: float

    def follows(self, before: _Piece, budget: int) -> bool:
        """Whether the next one can be loaded both while ``before`` runs forward and while this runs backward."""
        return self.runs + before.held <= budget and before.runs_forward + self.held_forward <= budget

    def waits(self, before: _Piece, budget: int) -> float:
        """Seconds for which computing waits between the two; also for this to leave, if ``before`` needs its room."""
        begins = self._leaves(before.begins + self.held - budget)
        runs = self._leaves(before.runs + self.held - budget) - before.forward
        return max(begins, runs) + max(0.0, self.loads - before.forward) + max(0.0, before.reloads - self.backward)

    def _leaves(self, missing: int) -> float:
        """Seconds until so many bytes of it have left."""
        return 0.0 if missing <= 0 else self.changes if missing <= self.weights else self.leaves

    def staying(self) -> _Piece:
        """The same beside what is kept of it: it takes what it computes with, and never moves."""
        return self._replace(runs=self.runs - self.state, held=0, held_forward=0, loads=0.0, changes=0.0, leaves=0.0)


_Pieces: TypeAlias = Mapping[int, Sequence[_Piece]]


class _Path(NamedTuple):
    """The best way to cut that ends with ``piece``, which begins at ``first`` and follows ``before``."""

    cost: float
    first: int
    piece: _Piece
    before: _Path | None


class Way(NamedTuple):
    """Where to cut, ascending; whether the last shard is kept on the device; estimated seconds of a minibatch."""

    cuts: tuple[int, ...]
    kept: bool
    seconds: float


def cut_ahead(runs: Runs, budget: int, rates: Rates, *, keep: bool = True) -> Way | None:
    """The best way to cut; None if none lets every shard be loaded while the one before it runs.

    ``keep``: the last shard may be kept.
    """
    whole = [*runs.starting(0)][-1]
    if runs.need(0, whole) <= budget:
        return Way((), False, 0.0)
    few = _fewest(runs, range(1, runs.count), _MOST_PLACES)
    found = _best(runs, [*few, runs.count], budget, rates, keep)
    if found is None and len(few) + 1 < runs.count:
        found = _best(runs, range(1, runs.count + 1), budget, rates, keep)
    return found


def _fewest(runs: Runs, places: Sequence[int], most: int) -> list[int]:
    """At ``most`` so many of ``places``: of neighbouring ones that where the fewest bytes are alive."""
    size = max(1, math.ceil(len(places) / most))
    groups = (places[start : start + size] for start in range(0, len(places), size))
    return [min(group, key=runs.alive.__getitem__) for group in groups]


def _best(runs: Runs, places: Sequence[int], budget: int, rates: Rates, keep: bool) -> Way | None:
    """The best way to cut at some of ``places``, of which the last is the end."""
    pieces = {first: _pieces(runs, first, budget, rates) for first in (0, *places[:-1])}
    found = [_way(runs, pieces, budget, rates, kept=False), *(_keeping(runs, pieces, budget, rates) if keep else ())]
    return min((way for way in found if way is not None), key=_seconds, default=None)


def _keeping(runs: Runs, pieces: _Pieces, budget: int, rates: Rates) -> Iterator[Way | None]:
    """The best ways to cut that keep the last shard, each in what it leaves of the budget."""
    ends = {first: found[-1] for first, found in pieces.items() if first and found and found[-1].last == runs.count}
    for start in _fewest(runs, list(ends), _MOST_KEPT):
        before = {first: [p for p in found if p.last <= start] for first, found in pieces.items() if first < start}
        yield _way(runs, before | {start: [ends[start].staying()]}, budget - ends[start].state, rates, kept=True)


def _way(runs: Runs, pieces: _Pieces, budget: int, rates: Rates, *, kept: bool) -> Way | None:
    """The best way to cut into some of ``pieces``, of which a shorter one always comes first."""
    units = 2 * _UNIT_CALLS / rates.calls
    ends: dict[int, list[_Path]] = {place: [] for place in (*pieces, runs.count)}
    for first, found in pieces.items():
        cost = units + runs.alive[first] * (1 / rates.load + 1 / rates.evict)
        # The cheapest first: what costs more than a way that was found need not be looked at.
        ends[first].sort(key=_cost)
        for piece in found:
            if piece.runs > budget or piece.last not in ends:
                continue
            path = _Path(0.0, 0, piece, None) if not first else _continued(ends[first], cost, first, piece, budget)
            if path is not None:
                ends[piece.last].append(path)
    last = ends[runs.count]
    if not last:
        return None
    best = min(last, key=_cost)
    return Way(_cuts(best), kept, _total(best))


def _total(path: _Path) -> float:
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


def _seconds(way: Way) -> float:
    return way.seconds


def _cost(path: _Path) -> float:
    return path.cost


def _continued(paths: list[_Path], cost: float, first: int, piece: _Piece, budget: int) -> _Path | None:
    """The cheapest way to cut, of some that are sorted, with ``piece`` after it, whose cut costs so many seconds."""
    best: _Path | None = None
    for path in paths:
        if best is not None and path.cost + cost >= best.cost:
            break
        if piece.follows(path.piece, budget):
            seconds = path.cost + cost + piece.waits(path.piece, budget)
            if best is None or seconds < best.cost:
                best = _Path(seconds, first, piece, path)
    return best


def _pieces(runs: Runs, first: int, budget: int, rates: Rates) -> list[_Piece]:
    """The runs that begin at ``first`` and fit."""
    found = []
    steps = runs.line.steps[first:]
    forwards, backwards = (list(accumulate(getattr(step, way) for step in steps)) for way in ("forward", "backward"))
    for run, forward, backward in zip(runs.starting(first), forwards, backwards, strict=True):
        if run.floor + runs.alive[first] > budget:
            break
        needed = runs.need(first, run)
        if needed > budget:
            continue
        entry, leaving = runs.alive[first], runs.alive[run.last]
        held = run.weights + runs.state(run) + entry + leaving
        # The last one turns from forward to backward in place, so it comes whole.
        turns = run.last == runs.count
        comes = held + run.activations if turns else run.weights + entry
        found.append(
            _Piece(
                run.last,
                needed,
                held,
                held + min(run.peak, run.activations + run.workspace),
                run.weights + entry + run.workspace + leaving,
                comes,
                run.weights,
                run.weights + runs.state(run),
                forward,
                forward + backward + run.stepped / rates.memory,
                (held if turns else run.weights + entry) / rates.load,
                held / rates.load,
                run.gradients / rates.evict,
                (run.gradients + run.optimizer) / rates.evict,
            )
        )
    return found


def _cuts(path: _Path) -> tuple[int, ...]:
    """The cuts of a way, ascending."""
    cuts = []
    while path.before is not None:
        cuts.append(path.first)
        path = path.before
    return tuple(reversed(cuts))

"""Cut a line so that, while one shard runs, the next can be loaded beside it: Line -> cuts.

Which runs may follow one another depends on both, so the dynamic program goes over runs, not over places. The best way
to cut costs the fewest seconds: what moving takes that is alive at its cuts, beginning and ending its units, and waits
for copies, were only the next shard loaded ahead: a short unit gives no time to load a large shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from hfusion.machine import Rates
from hfusion.passes.runs import Runs

# To begin and end a unit takes as long as so many calls of operators; where a call takes 3 us, it took 0.15 to 0.2 ms.
_UNIT_CALLS = 60
# Beyond so many places to cut, those where most is alive are left out: the time grows with their third power.
_MOST_PLACES = 128


class _Piece(NamedTuple):
    """A run as a shard: bytes, and seconds.

    ``runs``, ``held``: while it runs backward, and when it is loaded for that; ``runs_forward``, ``held_forward``: the
    same of its forward; ``weights``: what leaves first. ``forward``, ``backward`` compute; ``loads``, ``reloads`` copy
    for them, ``leaves`` writes back what changed, ``changes`` the weights of it.
    """

    last: int
    runs: int
    held: int
    runs_forward: int
    held_forward: int
    weights: int
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
        missing = before.runs + self.held - budget
        leaves = 0.0 if missing <= 0 else self.changes if missing <= self.weights else self.leaves
        return leaves + max(0.0, self.loads - before.forward) + max(0.0, before.reloads - self.backward)


class _Path(NamedTuple):
    """The best way to cut that ends with ``piece``, which begins at ``first`` and follows ``before``."""

    cost: float
    first: int
    piece: _Piece
    before: _Path | None


def cut_ahead(runs: Runs, budget: int, rates: Rates) -> tuple[int, ...] | None:
    """Where to cut, ascending; None if no cut lets every shard be loaded while the one before it runs."""
    whole = [*runs.starting(0)][-1]
    if runs.need(0, whole) <= budget:
        return ()
    few = _places(runs)
    found = _best(runs, few, budget, rates)
    if found is None and len(few) < runs.count:
        found = _best(runs, range(1, runs.count + 1), budget, rates)
    return found


def _places(runs: Runs) -> Sequence[int]:
    """Where to cut, and the end: of neighbouring places the one where the fewest bytes are alive."""
    size = math.ceil(runs.count / _MOST_PLACES)
    groups = (range(first, min(first + size, runs.count)) for first in range(1, runs.count, size))
    return [*(min(group, key=runs.alive.__getitem__) for group in groups), runs.count]


def _best(runs: Runs, places: Sequence[int], budget: int, rates: Rates) -> tuple[int, ...] | None:
    """The best way to cut at some of ``places``, of which the last is the end."""
    units = 2 * _UNIT_CALLS / rates.calls
    ends: dict[int, list[_Path]] = {place: [] for place in (0, *places)}
    for first in (0, *places[:-1]):
        cost = units + runs.alive[first] * (1 / rates.load + 1 / rates.evict)
        # The cheapest first: what costs more than a way that was found need not be looked at.
        ends[first].sort(key=_cost)
        for piece in _pieces(runs, first, budget, rates):
            if piece.last not in ends:
                continue
            path = _Path(0.0, 0, piece, None) if not first else _continued(ends[first], cost, first, piece, budget)
            if path is not None:
                ends[piece.last].append(path)
    last = ends[runs.count]
    return _cuts(min(last, key=_cost)) if last else None


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
                run.weights + entry + run.workspace + leaving,
                comes,
                run.weights,
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

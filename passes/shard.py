"""Cut a program into shards that fit a budget, where few bytes are alive: Program -> shards of a plan.

Every partition of the line into runs of steps is a path; dynamic programming finds the best one in O(n^2), and
stops to extend a run as soon as it outgrows the budget (as Jia et al., "Beyond Data and Model Parallelism",
arXiv:1807.05358, and Hydra's partitioner, arXiv:2110.08633, cut sequences). A storage that is alive at several
cuts counts at each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from hfusion.errors import PlanError
from hfusion.machine import Rates
from hfusion.passes.cost import Line, line
from hfusion.plan import Shard
from hfusion.program import Program


def shards(program: Program, batch: int, budget: int, rates: Rates, optimizer_state: float = 2) -> tuple[Shard, ...]:
    """The shards of ``program``, in order, each of which trains within ``budget`` bytes when it is alone there.

    Among all ways to cut, the bytes alive at the cuts are fewest; among these, the shards are.

    Args:
        batch: samples of a minibatch, in place of the dim that varies.
        budget: bytes of the device for weights, gradients, optimizer state, activations, both cuts, workspace.
        rates: of the device, for the seconds.
        optimizer_state: values the optimizer keeps per trained value, of its dtype: SGD 0, with momentum 1, Adam 2.

    Raises:
        PlanError: a bad argument; or no cut fits, which says the smallest budget that would do and which node needs it.
    """
    runs = _runs(program, batch, rates, optimizer_state)
    cuts = cut(runs, budget)
    if cuts is None:
        raise PlanError(_infeasible(program.name, runs, budget))
    return _between(runs, cuts, rates)


def shards_at(
    program: Program, cuts: Sequence[int], batch: int, rates: Rates, optimizer_state: float = 2
) -> tuple[Shard, ...]:
    """The shards of ``program`` cut before the operators numbered ``cuts``, whatever they need; else as `shards`.

    Raises:
        PlanError: a bad argument, or cuts that do not ascend inside the program.
    """
    runs = _runs(program, batch, rates, optimizer_state)
    if any(a >= b for a, b in pairwise([0, *cuts, runs.count])):
        raise PlanError(f"program {program.name}: cuts {list(cuts)} must ascend between 1 and {runs.count - 1}")
    return _between(runs, cuts, rates)


def _runs(program: Program, batch: int, rates: Rates, optimizer_state: float) -> Runs:
    if batch < 1 or not optimizer_state >= 0:
        raise PlanError(f"batch is {batch}, optimizer_state {optimizer_state}: give at least 1 sample and 0 values")
    costs = line(program, batch, rates)
    if not costs.steps:
        raise PlanError(f"program {program.name} holds no operator: there is nothing to shard")
    return Runs(costs, optimizer_state)


def _between(runs: Runs, cuts: Sequence[int], rates: Rates) -> tuple[Shard, ...]:
    places = [0, *cuts, runs.count]
    return tuple(_shard(runs, number, first, last, rates) for number, (first, last) in enumerate(pairwise(places)))


class Run(NamedTuple):
    """Bytes of the steps ``[first, last)`` as one shard, as in `Shard`; its cuts come on top."""

    last: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int

    @property
    def inner(self) -> int:
        """All but the cuts; never less for a longer run of the same beginning."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True)
class Runs:
    """The bytes of every run of steps of a line."""

    line: Line
    optimizer_state: float

    @property
    def count(self) -> int:
        return len(self.line.steps)

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """Bytes alive at the cut before each step, and at both ends: none, since those cut nothing."""
        spans = [(storage.born + 1, storage.last, storage.size) for storage in self.line.storages]
        return (0, *_levels(spans, self.count + 1)[1:-1], 0)

    @cached_property
    def _during(self) -> tuple[int, ...]:
        """Bytes alive while each step runs, with what it takes for itself."""
        spans = [(storage.born, storage.last, storage.size) for storage in self.line.storages]
        own = [step.workspace for step in self.line.steps]
        return tuple(map(sum, zip(_levels(spans, self.count), own, strict=True)))

    @cached_property
    def _ends(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per step the storages that are last used there, as (born, size)."""
        return self._grouped([(s.last, s.born, s.size) for s in self.line.storages])

    @cached_property
    def _saves(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per step the storages that it is the first to save, as (born, size)."""
        own = [(index, index, step.saved) for index, step in enumerate(self.line.steps)]
        return self._grouped([*own, *((s.saved, s.born, s.size) for s in self.line.storages if s.saved is not None)])

    @cached_property
    def _uses(self) -> tuple[tuple[tuple[int, int, bool], ...], ...]:
        """Per step the weights that it uses, as (the use before or -1, size, trained)."""
        found: list[list[tuple[int, int, bool]]] = [[] for _ in range(self.count)]
        for weight in self.line.weights:
            for before, index in zip((-1, *weight.uses), weight.uses, strict=False):
                found[index].append((before, weight.size, weight.trained))
        return tuple(map(tuple, found))

    def _grouped(self, items: list[tuple[int, int, int]]) -> tuple[tuple[tuple[int, int], ...], ...]:
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        for index, born, size in items:
            if index < self.count and size:
                found[index].append((born, size))
        return tuple(map(tuple, found))

    def starting(self, first: int) -> Iterator[Run]:
        """The runs that begin at ``first``, the shortest first.

        What is only handed through from one cut to the other is in both cuts, and in no workspace.
        """
        weights = gradients = activations = peak = 0
        through = self.alive[first]
        costs = zip(self._uses[first:], self._saves[first:], self._during[first:], self._ends[first:], strict=True)
        for index, (uses, saves, during, ends) in enumerate(costs, first):
            for before, size, trained in uses:
                if before < first:
                    weights += size
                    gradients += size if trained else 0
            for born, size in saves:
                activations += size if born >= first else 0
            for born, size in ends:
                through -= size if born < first else 0
            peak = max(peak, during)
            state = round(gradients * self.optimizer_state)
            yield Run(index + 1, weights, gradients, state, activations, peak - through)

    def need(self, first: int, run: Run) -> int:
        """Bytes on the device to train the run as a spilled shard; as `TaskPlan.device_bytes` counts it."""
        return run.inner + self.alive[first] + self.alive[run.last]

    def alone(self, step: int) -> int:
        """Bytes to train one step as a shard of its own."""
        return self.need(step, next(self.starting(step)))


def _levels(spans: Iterable[tuple[int, int, int]], count: int) -> list[int]:
    """At each of ``count`` places the sum of the sizes of all spans (first, last, size) over it."""
    changes = [0] * (count + 1)
    for first, last, size in spans:
        if first <= last:
            changes[min(first, count)] += size
            changes[min(last + 1, count)] -= size
    return list(accumulate(changes[:-1]))


def cut(runs: Runs, budget: int) -> tuple[int, ...] | None:
    """Where to cut, ascending, so that every run fits and the bytes alive at the cuts are fewest; None if none fits."""
    best: list[tuple[int, int] | None] = [(0, 0), *[None] * runs.count]
    came = [0] * (runs.count + 1)
    for first in range(runs.count):
        here, end = best[first], best[-1]
        if here is None:
            continue
        reached = (here[0] + runs.alive[first], here[1] + 1)
        if end is not None and reached >= end:
            continue
        for run in runs.starting(first):
            if run.inner + runs.alive[first] > budget:
                break
            known = best[run.last]
            if runs.need(first, run) <= budget and (known is None or reached < known):
                best[run.last], came[run.last] = reached, first
    return None if best[-1] is None else _back(came)


def tightest(runs: Runs) -> tuple[int, int, int]:
    """The smallest budget that some cut fits, and the run ``[first, last)`` that needs it."""
    bound = max(map(runs.alone, range(runs.count)))
    best = [0, *[bound] * runs.count]
    came = [0, *range(runs.count)]
    for first in range(runs.count):
        for run in runs.starting(first):
            if max(best[first], run.inner + runs.alive[first]) > bound:
                break
            reached = max(best[first], runs.need(first, run))
            if reached < best[run.last]:
                best[run.last], came[run.last] = reached, first
    places = [0, *_back(came), runs.count]
    worst = max(pairwise(places), key=lambda place: runs.need(place[0], _run(runs, *place)))
    return best[-1], *worst


def _back(came: list[int]) -> tuple[int, ...]:
    """The cuts on the way to the last place."""
    cuts = []
    place = came[-1]
    while place:
        cuts.append(place)
        place = came[place]
    return tuple(reversed(cuts))


def _run(runs: Runs, first: int, last: int) -> Run:
    return next(run for run in runs.starting(first) if run.last == last)


def _shard(runs: Runs, number: int, first: int, last: int, rates: Rates) -> Shard:
    run = _run(runs, first, last)
    steps = runs.line.steps[first:last]
    # The optimizer reads weights, gradients and state, and writes weights and state.
    touched = 3 * run.gradients + 2 * run.optimizer
    used = [weight for weight in runs.line.weights if any(first <= use < last for use in weight.uses)]
    return Shard(
        number,
        first,
        last,
        run.weights,
        run.gradients,
        run.optimizer,
        run.activations,
        run.workspace,
        boundary=runs.alive[last],
        forward=sum(step.forward for step in steps),
        backward=sum(step.backward for step in steps),
        step=touched / rates.memory,
        frozen=sum(weight.size for weight in used if not weight.written),
    )


def _infeasible(name: str, runs: Runs, budget: int) -> str:
    smallest, first, last = tightest(runs)
    node = max(range(first, last), key=runs.alone)
    run = _run(runs, first, last)
    cuts = runs.alive[first] + runs.alive[last]
    return (
        f"program {name}: no cut into shards fits {budget:,} bytes; the smallest budget that would do is "
        f"{smallest:,} bytes, which node {runs.line.steps[node].where} needs: weights {run.weights:,}, gradients "
        f"{run.gradients:,}, optimizer {run.optimizer:,}, activations {run.activations:,}, values at its cuts "
        f"{cuts:,}, workspace {run.workspace:,}; give more memory, fewer samples or fewer members"
    )

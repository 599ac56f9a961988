"""The bytes of every run of steps of a line, were it a shard: what the ways to cut are chosen by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from hfusion.passes.cost import Line


class Run(NamedTuple):
    """Bytes of the steps ``[first, last)`` as one shard, as in `Shard`; its cuts come on top.

    ``floor``: what a longer run of the same beginning needs at least.
    """

    last: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    floor: int

    @property
    def stepped(self) -> int:
        """Bytes an optimizer step touches: it reads weights, gradients and state, and writes weights and state."""
        return 3 * self.gradients + 2 * self.optimizer

    @property
    def inner(self) -> int:
        """All but the cuts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True)
class Runs:
    """The bytes of every run of steps of a line; ``carried``: gradients outlive their backward, as in `TaskPlan`."""

    line: Line
    optimizer_state: float
    carried: bool = False

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
        """Per step what a shard that has it holds for backward beside its cuts, as (born, size).

        What is saved but used later on is in the cut before that.
        """
        own = [(index, index, step.saved) for index, step in enumerate(self.line.steps)]
        kept = [storage for storage in self.line.storages if storage.saved is not None]
        return self._grouped([*own, *((min(s.last, self.count - 1), s.born, s.size) for s in kept)])

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

        What is only handed through from one cut to the other is in both cuts, and in no workspace. A gradient lives
        from the last use of its value down to where that was made; those of the second cut, with which the backward
        begins, to its end.
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
            workspace = max(during, peak + max(0, self.alive[index + 1] - through) if index > first else 0) - through
            peak = max(peak, during)
            state = round(gradients * self.optimizer_state)
            floor = weights + gradients + state + activations + peak - through
            yield Run(index + 1, weights, gradients, state, activations, workspace, floor)

    def need(self, first: int, run: Run) -> int:
        """Bytes on the device to train the run as a spilled shard; as `TaskPlan.device_bytes` counts it."""
        fresh = run.gradients if self.carried else 0
        return run.inner + fresh + self.alive[first] + self.alive[run.last]

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

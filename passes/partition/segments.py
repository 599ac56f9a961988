"""The bytes that every run of steps of a line would take as a shard, from which cuts are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from hfusion.device.calibrate import Rates
from hfusion.passes.cost.cost import Line, OperatorCost, Storage, Weight
from hfusion.schedule.actions import Shard


class Segment(NamedTuple):
    """Bytes of the steps ``[first, last)`` as one shard, as in `Shard`; its cuts come on top.

    ``floor``: the least that a longer run with the same beginning needs. ``passing``: the peak of a forward that
    saves nothing for backward.
    """

    last: int
    weights: int
    frozen: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    peak: int
    floor: int
    passing: int

    @property
    def stepped(self) -> int:
        """Bytes an optimizer step touches: it reads weights, gradients and state, and writes weights and state."""
        return 3 * self.gradients + 2 * self.optimizer


@dataclass(frozen=True)
class Segments:
    """The bytes of every run of steps of a line; ``carried``: gradients outlive their backward, as in `TaskPlan`."""

    line: Line
    optimizer_state: float
    carried: bool = False

    @property
    def count(self) -> int:
        return len(self.line.steps)

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """Bytes alive at the cut before each step; 0 at both ends of the line, where nothing is cut."""
        spans = [(storage.born + 1, storage.last, storage.size) for storage in self.line.storages]
        return (0, *_levels(spans, self.count + 1)[1:-1], 0)

    @cached_property
    def _during(self) -> tuple[int, ...]:
        """Bytes alive while each step runs, with the workspaces of the step and its backward."""
        spans = [(storage.born, storage.last, storage.size) for storage in self.line.storages]
        step_bytes = [step.workspace + step.summed for step in self.line.steps]
        return tuple(map(sum, zip(_levels(spans, self.count), step_bytes, strict=True)))

    @cached_property
    def _owed(self) -> tuple[int, ...]:
        """For each cut, the bytes of gradients of weights that steps on both sides of the cut use."""
        spans = [(weight.uses[0] + 1, weight.uses[-1], weight.size) for weight in self.line.weights if weight.trained]
        return tuple(_levels(spans, self.count + 1))

    @cached_property
    def _result_bytes(self) -> tuple[int, ...]:
        """For each step, the bytes of its results that later steps use."""
        sizes = [0] * self.count
        for storage in self.line.storages:
            sizes[storage.born] += storage.size if storage.last > storage.born else 0
        return tuple(sizes)

    @cached_property
    def _ending_storages(self) -> tuple[tuple[Storage, ...], ...]:
        """For each step, the storages whose last use it is."""
        ending: list[list[Storage]] = [[] for _ in range(self.count)]
        for storage in self.line.storages:
            ending[min(storage.last, self.count - 1)].append(storage)
        return tuple(map(tuple, ending))

    @cached_property
    def _uses(self) -> tuple[tuple[tuple[int, Weight], ...], ...]:
        """For each step, the weights that it uses, each with the last step before it that uses the weight, or -1."""
        uses: list[list[tuple[int, Weight]]] = [[] for _ in range(self.count)]
        for weight in self.line.weights:
            for before, index in zip((-1, *weight.uses), weight.uses, strict=False):
                uses[index].append((before, weight))
        return tuple(map(tuple, uses))

    def starting(self, first: int) -> Iterator[Segment]:
        """Yield the runs that begin at ``first``, the shortest first.

        Values that only pass through from one cut to the other are in both cuts, and in neither workspace nor peak.
        """
        weights = frozen = gradients = 0
        through = self.alive[first]
        growing = _Growing(first, self.count)
        for index in range(first, self.count):
            growing.add_step(self.line.steps[index], self._during[index], self._result_bytes[index])
            for before, weight in self._uses[index]:
                if before < first:
                    weights += weight.size
                    gradients += weight.size if weight.trained else 0
                    frozen += 0 if weight.written else weight.size
                if weight.trained:
                    growing.add_gradient(before + 1, weight.size)
            for storage in self._ending_storages[index]:
                if storage.born >= first:
                    growing.free_storage(storage)
                elif storage.last == index:
                    through -= storage.size
            state = round(gradients * self.optimizer_state)
            peak = growing.peak - through + self._owed[index + 1]
            passing = workspace = growing.workspace(keeps=False)
            if index + 1 == self.count:
                workspace = growing.workspace(keeps=True)
            floor = weights + state + max(gradients, growing.activations)
            sizes = (growing.activations, workspace, peak, floor, passing)
            yield Segment(index + 1, weights, frozen, gradients, state, *sizes)

    def state(self, run: Segment) -> int:
        """Return the bytes that move with a run's weights: optimizer state, and gradients if they are carried."""
        return run.optimizer + (run.gradients if self.carried else 0)

    def shard(self, number: int, first: int, segment: Segment, rates: Rates) -> Shard:
        """Return ``segment``, which begins at step ``first``, as shard ``number``."""
        steps = self.line.steps[first : segment.last]
        forward, backward = sum(step.forward for step in steps), sum(step.backward for step in steps)
        sizes = (segment.activations, segment.workspace, segment.peak, self.alive[segment.last])
        state = (segment.weights, segment.gradients, segment.optimizer)
        seconds = (forward, backward, segment.stepped / rates.memory)
        return Shard(number, first, segment.last, *state, *sizes, *seconds, segment.frozen, passing=segment.passing)

    def need(self, first: int, run: Segment) -> int:
        """Bytes on the device to train the run as a spilled shard; as `TaskPlan.device_bytes` counts it."""
        state = self.state(run)
        # The last shard goes directly from forward to backward: its state is loaded, too, and it keeps its activations.
        forward = run.workspace + (state + run.activations if run.last == self.count else 0)
        return run.weights + self.alive[first] + self.alive[run.last] + max(state + run.peak, forward)

    def single_step_bytes(self, step: int) -> int:
        """Bytes to train one step as a shard of its own."""
        return self.need(step, next(self.starting(step)))


class _Growing:
    """Bytes alive while each step of a growing run executes, backward and forward.

    Backward a gradient lives from the last use of its value down to where that was made; those at the second cut, with
    which the backward begins, to its end; those of weights from their last use to the end. What is saved is alive down
    to the step that saved it; what is saved and used after the run is in the cut. Forward counts what is in no cut.
    """

    def __init__(self, first: int, count: int) -> None:
        self.activations = 0
        self._first = first
        self._size = 0
        self._backward, self._forward, self._temporaries = np.zeros((3, count - first), dtype=np.int64)

    @property
    def peak(self) -> int:
        """The peak bytes of the backward."""
        return int(self._backward[: self._size].max())

    def workspace(self, *, keeps: bool) -> int:
        """Return the peak bytes of the forward, without the activations if it ``keeps`` them."""
        return int((self._temporaries if keeps else self._forward)[: self._size].max())

    def add_step(self, step: OperatorCost, during: int, result_bytes: int) -> None:
        """Add a step. ``during``: the bytes alive while it runs. ``result_bytes``: of results that later steps use."""
        self._backward[: self._size] += result_bytes
        self.activations += step.saved
        self._backward[self._size] = during + self.activations
        self._forward[self._size] = self._temporaries[self._size] = step.workspace
        self._size += 1

    def add_gradient(self, first: int, size: int) -> None:
        """Count a weight's gradient in the backward of all steps from ``first`` to the latest, which creates it."""
        self._backward[max(0, first - self._first) : self._size] += size

    def free_storage(self, storage: Storage) -> None:
        """Free ``storage``, created in the run and last used by the latest step."""
        born = storage.born - self._first
        self._forward[born : self._size] += storage.size
        if storage.last > storage.born:
            self._backward[:born] -= storage.size
        if storage.saved is None:
            self._temporaries[born : self._size] += storage.size
        else:
            self.activations += storage.size
            self._backward[storage.saved - self._first : self._size] += storage.size


def _levels(spans: Iterable[tuple[int, int, int]], count: int) -> list[int]:
    """Return, for each of ``count`` positions, the total size of the spans (first, last, size) that include it."""
    changes = [0] * (count + 1)
    for first, last, size in spans:
        if first <= last:
            changes[min(first, count)] += size
            changes[min(last + 1, count)] -= size
    return list(accumulate(changes[:-1]))

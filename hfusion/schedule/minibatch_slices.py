"""Slices of several minibatches of a resident task, which are scheduled together to share the cost of a decision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hfusion.schedule.actions import Act
from hfusion.schedule.plan import Phase, TaskPlan, Unit
from hfusion.schedule.timeline import Span

# Estimated seconds of a slice. A decision takes some 0.2 ms of it, and other tasks wait at most this long.
_SECONDS = 0.05


class Ran(NamedTuple):
    """The times at which a minibatch began, was read, had its gradients, was done, and was saved, if it was."""

    began: float
    read: float
    computed: float
    ended: float
    saved: float


@dataclass(frozen=True)
class Slices:
    """Groups the minibatches of a one-shard plan into slices of ``size``; the last slice of an epoch may be smaller."""

    plan: TaskPlan
    size: int

    @classmethod
    def of(cls, plan: TaskPlan, alone: bool) -> Slices:
        """Return slices of a short estimated duration; of a whole epoch for a task ``alone`` on its device."""
        epoch = plan.steps // plan.epochs
        if alone or not plan.step_seconds:
            return cls(plan, epoch)
        return cls(plan, max(1, min(int(_SECONDS / plan.step_seconds), epoch)))

    @property
    def _epoch(self) -> int:
        return self.plan.steps // self.plan.epochs

    @property
    def _count(self) -> int:
        """Number of slices per epoch."""
        return math.ceil(self._epoch / self.size)

    @cached_property
    def scheduled(self) -> TaskPlan:
        """The plan for the engine: each slice counts as one minibatch, all computed in its backward."""
        (shard,) = self.plan.shards
        updates = math.ceil(self._epoch / self.plan.accumulate)
        seconds = self._epoch * (shard.forward + shard.backward) + updates * shard.step
        # Subtract the forward seconds, which stay in ``forward`` because evaluations use them, too.
        whole = replace(shard, backward=max(0.0, seconds / self._count - shard.forward), step=0.0)
        steps = self.plan.epochs * self._count
        return replace(
            self.plan,
            shards=(whole,),
            steps=steps,
            epoch=self._count,
            accumulate=1,
            # Clipping makes the engine reserve memory for gradients that outlive a minibatch.
            clipped=self.plan.carried,
            # A save may be due within a slice, so the training itself makes it.
            save_every=None,
        )

    def first(self, index: int) -> int:
        """Return the first minibatch of a slice."""
        epoch, position = divmod(index, self._count)
        return epoch * self._epoch + position * self.size

    def end(self, index: int) -> int:
        """Return the number of minibatches that have ended after a slice."""
        return min(self.first(index) + self.size, (index // self._count + 1) * self._epoch)

    def unit_index_after(self, steps: int) -> int:
        """Return the index of the scheduled unit that follows ``steps`` minibatches, which may end within a slice."""
        epoch, rest = divmod(steps, self._epoch)
        return self.scheduled.unit_index_after(epoch * self._count + rest // self.size)

    def unit(self, step: int, phase: Phase) -> Unit:
        """Return the unit of a single minibatch in the original plan."""
        updates = self.plan.closes(step) and (
            phase is Phase.UPDATE or (phase is Phase.BACKWARD and not self.plan.clipped)
        )
        return Unit(self.plan.name, step, phase, 0, updates)

    def spans(
        self, spans: Iterable[Span], ran: Sequence[Ran], start: int, saved: Mapping[int, float]
    ) -> Iterator[Span]:
        """Yield ``spans`` with those of slices replaced by those of single minibatches.

        ``ran``: the times of the minibatches from ``start`` on; ``saved``: start times of saves after evaluations.
        """
        # The end of the previous minibatch: the time from then on counts for the next one.
        free: float | None = None
        for span in spans:
            if span.act is Act.FORWARD:
                free = span.start
            elif span.act is Act.BACKWARD:
                # The task may have ended within the slice.
                last = min(self.end(span.step), start + len(ran))
                for step in range(max(start, self.first(span.step)), last):
                    began = span.start if free is None else free
                    yield from self._minibatch(span, step, ran[step - start]._replace(began=began))
                    free = ran[step - start].saved
            elif span.act in (Act.LOAD, Act.EVICT):
                free = None
                yield replace(span, step=self.first(span.step))
            elif span.act is Act.EVALUATE and span.step in saved:
                yield replace(span, end=saved[span.step])
                yield replace(span, act=Act.SAVE, start=saved[span.step], bytes=0)
            elif span.act is Act.EVALUATE:
                yield span

    def _minibatch(self, span: Span, step: int, ran: Ran) -> Iterator[Span]:
        times = {Act.FORWARD: ran[:2], Act.BACKWARD: ran[1:3], Act.STEP: ran[2:4], Act.SAVE: ran[3:]}
        phases = [
            Phase.FORWARD,
            Phase.BACKWARD,
            *([Phase.UPDATE] if self.plan.clipped and self.plan.closes(step) else ()),
        ]
        for phase in phases:
            for action in self.plan.actions_of(self.unit(step, phase)).computes:
                start, end = times[action.act]
                size = max(action.takes, action.frees)
                yield replace(span, act=action.act, step=step, start=start, end=end, bytes=size)

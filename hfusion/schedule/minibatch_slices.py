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

# Of a slice, by estimate. A decision takes some 0.2 ms of it, and other tasks wait no longer for a device.
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
    """The minibatches of a plan of one shard, ``size`` at a time; the last ones of an epoch may be fewer."""

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
        """Slices of an epoch."""
        return math.ceil(self._epoch / self.size)

    @cached_property
    def scheduled(self) -> TaskPlan:
        """The plan with a slice for a minibatch: all is computed in the slice's backward."""
        (shard,) = self.plan.shards
        updates = math.ceil(self._epoch / self.plan.accumulate)
        seconds = self._epoch * (shard.forward + shard.backward) + updates * shard.step
        # Without that of the forward, which evaluations have, too.
        whole = replace(shard, backward=max(0.0, seconds / self._count - shard.forward), step=0.0)
        steps = self.plan.epochs * self._count
        return replace(
            self.plan,
            shards=(whole,),
            steps=steps,
            epoch=self._count,
            accumulate=1,
            # Gradients that outlive a minibatch take room as they do where they are clipped.
            clipped=self.plan.carried,
            # It may be in the midst of a slice.
            save_every=None,
        )

    def first(self, index: int) -> int:
        """The first minibatch of a slice."""
        epoch, place = divmod(index, self._count)
        return epoch * self._epoch + place * self.size

    def end(self, index: int) -> int:
        """Return the number of minibatches that have ended after a slice."""
        return min(self.first(index) + self.size, (index // self._count + 1) * self._epoch)

    def after(self, steps: int) -> int:
        """The position of the scheduled unit that follows so many minibatches; a slice may be begun."""
        epoch, rest = divmod(steps, self._epoch)
        return self.scheduled.after(epoch * self._count + rest // self.size)

    def unit(self, step: int, phase: Phase) -> Unit:
        """A unit of one minibatch."""
        updates = self.plan.closes(step) and (
            phase is Phase.UPDATE or (phase is Phase.BACKWARD and not self.plan.clipped)
        )
        return Unit(self.plan.name, step, phase, 0, updates)

    def spans(
        self, spans: Iterable[Span], ran: Sequence[Ran], start: int, saved: Mapping[int, float]
    ) -> Iterator[Span]:
        """Yield the spans of single minibatches, from number ``start`` on, in place of those of slices.

        ``saved``: start times of the saves of evaluated minibatches.
        """
        # Time between minibatches belongs to the task, too.
        free: float | None = None
        for span in spans:
            if span.act is Act.FORWARD:
                free = span.start
            elif span.act is Act.BACKWARD:
                # It may have ended before the slice did.
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
                begin, end = times[action.act]
                size = max(action.takes, action.frees)
                yield replace(span, act=action.act, step=step, start=begin, end=end, bytes=size)

"""Work between two units of an array: callbacks, scheduler steps, and members that stop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hfusion.optim.lr_scheduler import PerMember
from hfusion.runtime.training import Training
from hfusion.schedule.plan import Phase, TaskPlan, Unit
from hfusion.tasks.arrange import Arrangement
from hfusion.tasks.array_log import ArrayEvent, ArrayNote
from hfusion.tasks.source import Stream
from hfusion.tasks.stopping import KeptMembers, OnResult, answered
from hfusion.tasks.task import Evaluation, Step


@dataclass(eq=False)
class Border:
    """Does the work between the units of one array.

    Attributes:
        plan: the plan of the array.
        streams: its sources of minibatches: for training and, if there is an eval loader, for evaluation.
        scheduler: drives the array's optimizer.
        on_result: returns the members that stop. It is called with the lock ``asking`` held.
        listen: called with every event of the array.
        rates: float64 ``[B]``, the learning rates before the first minibatch.
        eager: why the array is not compiled; empty if it is.
        aborted: returns whether the run is being aborted, so that evictions may be incomplete.
    """

    setup: Arrangement
    plan: TaskPlan
    training: Training
    streams: Sequence[Stream]
    scheduler: LRScheduler | None
    kept: KeptMembers
    on_result: OnResult | None
    asking: Lock
    listen: Callable[[ArrayEvent], None]
    rates: Tensor
    eager: str
    aborted: Callable[[], bool] = lambda: False
    # Number of minibatches that have ended, and how many of their losses were passed to callbacks.
    _ended: int = 0
    _heard: int = 0

    @property
    def units(self) -> int:
        """Number of scheduled units up to and including the last minibatch."""
        training = self.training
        return training.scheduled.units if training.over else training.units_after(training.minibatches)

    def resume(self, stopped: dict[int, int]) -> None:
        """Continue an earlier run, in which the members ``stopped`` had stopped.

        `on_result` gets the earlier results again, so that it can rebuild its state.
        """
        self.kept.resume(stopped)
        self._note_stopped()
        self._ended = self._heard = len(self.training.losses)
        epochs = len(self.training.evaluations) // max(1, self.plan.evaluated)
        for epoch in range(epochs):
            self.kept.count(self._evaluation(epoch).losses)
        for step in range(len(self.training.losses) if self.on_result is not None else 0):
            self._ask(self._step(step))
            epoch, rest = divmod(step + 1, self.setup.task.epoch)
            if not rest and epoch <= epochs:
                self._ask(self._evaluation(epoch - 1))

    def ended(self, unit: Unit) -> None:
        """Handle the end of a unit."""
        training, plan = self.training, self.plan
        if unit.phase is Phase.BACKWARD and unit.shard == 0:
            self._ended = unit.step + 1
            self._hear()
            if self._ended == plan.steps:
                self.arrive()
        if plan.trained(unit):
            self._trained(unit.step)
        elif unit.phase is Phase.EVALUATE and unit.shard == len(plan.shards) - 1:
            self.arrive()
            training.evaluations[unit.step] = self.kept.hide(training.evaluations[unit.step])
            epoch, step = divmod(unit.step, plan.evaluated)
            if step == plan.evaluated - 1:
                self._evaluated(epoch)

    def arrive(self) -> None:
        """Wait for the losses of all minibatches that have ended, and pass them to callbacks."""
        self.training.arrive()
        self._hear()

    def _hear(self) -> None:
        """Pass the losses that have arrived on the host to callbacks."""
        losses = self.training.losses
        while self._heard < min(self._ended, len(losses)):
            step, self._heard = self._heard, self._heard + 1
            losses[step] = self.kept.hide(losses[step])
            self._tell(self._step(step))

    def _trained(self, step: int) -> None:
        epoch = self.setup.task.epoch
        if self.plan.closes(step):
            self._step_scheduler("step", lambda: self._losses(step, step + 1))
        if not (step + 1) % epoch and not self.plan.evaluated:
            self._step_scheduler("epoch", lambda: self._losses(step + 1 - epoch, step + 1))
        if self.on_result is not None:
            self.arrive()
            self._stop(self._ask(self._step(step)))

    def _evaluated(self, epoch: int) -> None:
        evaluation = self._evaluation(epoch)
        self._step_scheduler("epoch", lambda: evaluation.losses)
        self._tell(evaluation)
        improved, over = self.kept.count(evaluation.losses)
        if improved and self.setup.task.restores_best:
            self.training.state.settle()
            if not self.aborted():
                self.kept.keep_best(improved)
        self._stop({*(self.setup.members[row] for row in over), *self._ask(evaluation)})

    def _step_scheduler(self, interval: str, losses: Callable[[], Tensor]) -> None:
        """Step the scheduler where a loop over one member would: after each ``"step"`` or each ``"epoch"``.

        ``losses``: returns ``[n, B]``, of the step, or of the evaluation or training of the epoch. It may wait, so it
        is called only if a member has a ReduceLROnPlateau.
        """
        if self.scheduler is None or interval != self.setup.task.scheduler_interval:
            return
        if isinstance(self.scheduler, PerMember):
            metrics = losses().mean(0) if any(self.scheduler.takes_metrics) else None
            self.scheduler.step(metrics=metrics, rows=self.kept.rows)
        else:
            self.scheduler.step()

    def _losses(self, start: int, end: int) -> Tensor:
        """Return the losses ``[n, B]`` of minibatches; wait for those that are not on the host yet."""
        if len(self.training.losses) < end:
            self.arrive()
        return torch.stack(self.training.losses[start:end])

    def _step(self, step: int) -> Step:
        epoch, minibatch = divmod(step, self.setup.task.epoch)
        return Step(self.setup.task.name, epoch, minibatch, self.setup.members, self.training.losses[step])

    def _evaluation(self, epoch: int) -> Evaluation:
        count = self.plan.evaluated
        losses = torch.stack(self.training.evaluations[epoch * count : (epoch + 1) * count])
        return Evaluation(self.setup.task.name, epoch, self.setup.members, losses)

    def _tell(self, heard: Step | Evaluation) -> None:
        for callback in self.setup.task.callbacks:
            callback(heard)
        self.listen(heard)

    def _ask(self, result: Step | Evaluation) -> list[int]:
        """Call `on_result`, if there is one, and return the members that it stops."""
        if self.on_result is None:
            return []
        with self.asking:
            answer: Any = self.on_result(result)
        return answered(answer, result)

    def _stop(self, members: Collection[int]) -> None:
        if not members:
            return
        self.training.state.settle()
        if not self.aborted():
            self.kept.stop(members, self.training.minibatches)
            self._note_stopped()
            self.listen(ArrayNote("stopped", self.training.minibatches, tuple(self.kept.steps)))

    def _note_stopped(self) -> None:
        self.training.over = self.kept.all_stopped
        self.training.idle = frozenset(range(len(self.setup.members))).difference(self.kept.rows)


@contextmanager
def all_heard(borders: Sequence[Border]) -> Iterator[None]:
    """Context manager: on an error, pass the losses of minibatches that have ended to callbacks, then re-raise."""
    try:
        yield
    except BaseException:
        for border in borders:
            with suppress(Exception):
                border.arrive()
        raise

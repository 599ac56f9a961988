"""The learning-rate schedulers of a task, stepped where a loop over one member would step them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import lr_scheduler

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.lr_scheduler import PerMember
from hfusion.tasks.task import Task


class TaskScheduler:
    """Steps the learning-rate scheduler of an array. ``scheduler`` drives the array's optimizer."""

    def __init__(self, task: Task, optimizer: FusedOptimizer, members: Sequence[int]) -> None:
        scheduler: Any = task.scheduler
        self.scheduler = scheduler
        if not isinstance(scheduler, lr_scheduler.LRScheduler):
            makes = scheduler if callable(scheduler) else [scheduler[member] for member in members]
            self.scheduler = PerMember(optimizer, makes)
        self._interval = task.scheduler_interval

    def step(self, interval: str, losses: Callable[[], Tensor], rows: Sequence[int]) -> None:
        """Step the scheduler if its interval, a ``"step"`` of the optimizer or an ``"epoch"``, has ended.

        Args:
            losses: returns ``[n, B]``, of the step, or of the evaluation or training of the epoch. It may wait, so it
                is called only if a member has a ReduceLROnPlateau.
            rows: the members that go on.
        """
        if interval != self._interval:
            return
        if isinstance(self.scheduler, PerMember):
            metrics = losses().mean(0) if any(self.scheduler.takes_metrics) else None
            self.scheduler.step(metrics=metrics, rows=rows)
        else:
            self.scheduler.step()

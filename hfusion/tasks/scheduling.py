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
        self._every_step = task.scheduler_interval == "step"

    def stepped(self, losses: Callable[[], Tensor], rows: Sequence[int]) -> None:
        """Step the scheduler after an optimizer step, if its interval is a step. ``rows``: members that go on.

        ``losses()`` returns ``[1, B]``. It may wait, so it is called only if a member has a ReduceLROnPlateau.
        """
        if self._every_step:
            self._step(losses, rows)

    def epoch(self, losses: Callable[[], Tensor], rows: Sequence[int]) -> None:
        """Step after an epoch, if that is the interval. ``losses()``: ``[n, B]`` of its evaluation or training."""
        if not self._every_step:
            self._step(losses, rows)

    def _step(self, losses: Callable[[], Tensor], rows: Sequence[int]) -> None:
        if isinstance(self.scheduler, PerMember):
            metrics = losses().mean(0) if any(self.scheduler.takes_metrics) else None
            self.scheduler.step(metrics=metrics, rows=rows)
        else:
            self.scheduler.step()

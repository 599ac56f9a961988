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
    """The scheduler of an array: ``scheduler`` is that of the optimizer, which it drives."""

    def __init__(self, task: Task, optimizer: FusedOptimizer, members: Sequence[int]) -> None:
        given: Any = task.scheduler
        self.scheduler = given
        if not isinstance(given, lr_scheduler.LRScheduler):
            makes = given if callable(given) else [given[member] for member in members]
            self.scheduler = PerMember(optimizer, makes)
        self._every_step = task.scheduler_interval == "step"

    def stepped(self, losses: Callable[[], Tensor], rows: Sequence[int]) -> None:
        """The optimizer has stepped, after a minibatch of ``losses() [1, B]``; members ``rows`` go on.

        Losses may have to be waited for, and are asked for only where a member has a ReduceLROnPlateau.
        """
        if self._every_step:
            self._step(losses, rows)

    def epoch(self, losses: Callable[[], Tensor], rows: Sequence[int]) -> None:
        """An epoch is over, of minibatches that were evaluated, or else trained, with ``losses() [n, B]``."""
        if not self._every_step:
            self._step(losses, rows)

    def _step(self, losses: Callable[[], Tensor], rows: Sequence[int]) -> None:
        if isinstance(self.scheduler, PerMember):
            metrics = losses().mean(0) if any(self.scheduler.takes_metrics) else None
            self.scheduler.step(metrics=metrics, rows=rows)
        else:
            self.scheduler.step()

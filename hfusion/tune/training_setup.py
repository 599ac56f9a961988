"""The functions, loaders and options with which the trials of a sweep are trained, and the result of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hfusion.step.compile_mode import Compile
from hfusion.tune.loaders import Loaders
from hfusion.tune.space import ArrayChoices, MakeScheduler


@dataclass(frozen=True, eq=False)
class SweepRecipe:
    """Options that the arrays of a sweep share.

    Attributes:
        objectives: the number of values that the metric returns.
        scheduler: makes a scheduler from the optimizer of one member and the values that its trial chose.
        every_step: schedulers step after each update, not after each epoch.
    """

    loss: Callable[..., Any]
    loaders: Loaders
    eval_loader: Iterable[Any] | None
    metric: Callable[..., Any] | None
    device: torch.device
    compile: Compile
    scheduler: MakeScheduler | None = None
    every_step: bool = False
    objectives: int = 1

    @property
    def evaluates(self) -> bool:
        """True if the value of a trial needs an evaluation, instead of its mean training loss."""
        return self.metric is not None or self.eval_loader is not None

    def judged(self, choices: ArrayChoices) -> tuple[str, Iterable[Any]]:
        """Return the loader to evaluate an array on, after its name in errors."""
        if self.eval_loader is None:
            return "loader", self.loaders.loader(choices.loader)
        return "eval_loader", self.eval_loader

    def loss_of(self, choices: ArrayChoices) -> Callable[..., Any]:
        """Return the loss with the options of an array."""
        return partial(self.loss, **choices.loss) if choices.loss else self.loss


@dataclass(frozen=True)
class EpochResult:
    """The values and times of an epoch of an array.

    Attributes:
        values: the values of each member, by its tag: empty if no values were requested, NaN if training diverged.
        seconds: of the epoch.
        steps: the number of minibatches.
    """

    values: dict[str, tuple[float, ...]]
    seconds: float
    steps: int

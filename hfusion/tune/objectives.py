"""Values of several objectives: metrics that return them, and the trials that no other trial dominates."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from hfusion.population.evaluation import is_updated, number
from hfusion.tune.population_based_training import PBT
from hfusion.tune.study import study_view

if TYPE_CHECKING:
    from optuna import Study


def check_objectives(count: int, metric: Callable[..., Any] | None, pruner: Any, pbt: PBT | None) -> None:
    """Raise ValueError if arguments that need one objective, or no metric, are used with several objectives."""
    if count == 1:
        return
    if metric is None:
        raise ValueError(
            f"{count} objectives need a metric that returns {count} values, such as "
            "lambda outputs, target: (accuracy(outputs, target), F.cross_entropy(outputs, target)); metric is None"
        )
    if pruner is not None and type(pruner).__name__ != "NopPruner":
        raise ValueError(
            f"pruner={type(pruner).__name__} decides by one value, and there are {count} objectives: leave pruner out, "
            "or search with one direction"
        )
    if pbt is not None:
        raise ValueError(
            f"pbt ranks trials by one value, and there are {count} objectives: leave pbt out, or search with one "
            "direction"
        )


def check_plateaus(count: int, kinds: Sequence[str]) -> None:
    """Raise ValueError for a scheduler that watches one value after an epoch, if there are several objectives."""
    if count > 1 and "ReduceLROnPlateau" in kinds:
        raise ValueError(
            f"a ReduceLROnPlateau watches one value, and there are {count} objectives: give another scheduler, or "
            'scheduler_interval="step", where it watches the loss'
        )


class MetricValues:
    """Wraps a metric of several objectives as a metric that returns one number.

    The number is the index of the member's values in ``noted``, so that code for metrics of one value can evaluate it.

    Args:
        metric: a function of outputs and targets that returns ``count`` values, or a metric with update and compute.
    """

    def __init__(self, metric: Callable[..., Any], count: int) -> None:
        self._metric, self._count = metric, count
        self.noted: list[tuple[float, ...]] = []

    @property
    def metric(self) -> Callable[..., Any]:
        """The wrapped metric, which returns an index into ``noted``."""
        if is_updated(self._metric):
            return _UpdatedMetric(self._metric, self._note)
        return lambda outputs, target: self._note(self._metric(outputs, target))

    def _note(self, values: Any) -> int:
        self.noted.append(_numbers(values, self._count))
        return len(self.noted) - 1


class _UpdatedMetric:
    """Wraps a metric with ``update`` and ``compute``. Deep copies append to the same list of values."""

    def __init__(self, metric: Any, note: Callable[[Any], int]) -> None:
        self._metric, self._note = metric, note

    def __deepcopy__(self, memo: dict[int, Any]) -> _UpdatedMetric:
        return _UpdatedMetric(copy.deepcopy(self._metric, memo), self._note)

    def __call__(self, outputs: Any, target: Any) -> Any:
        return self._metric(outputs, target)

    def reset(self) -> None:
        self._metric.reset()

    def update(self, outputs: Any, target: Any) -> None:
        self._metric.update(outputs, target)

    def compute(self) -> int:
        return self._note(self._metric.compute())


def _numbers(values: Any, count: int) -> tuple[float, ...]:
    """Return the values of one member as floats. Raises ValueError if there are not ``count`` of them."""
    if isinstance(values, Tensor | np.ndarray):
        values = [values] if not values.ndim else [*values]
    if not isinstance(values, tuple | list):
        values = [values]
    if len(values) != count:
        raise ValueError(
            f"the metric returned {len(values)} value{'s' * (len(values) != 1)} for one member, and the study has "
            f"{count} objectives: return one for each direction, in their order"
        )
    return tuple(number(value) for value in values)


class BestTrials:
    """The best of the trials that a sweep completed, by Optuna's rules for objectives, constraints and equal values.

    Args:
        numbers: the numbers of the sweep's trials, which grow as it asks for more.

    Attributes:
        models: the models of the best trials so far, by their numbers.
    """

    def __init__(self, study: Study, numbers: Sequence[int]) -> None:
        self._study, self._numbers = study, numbers
        self.models: dict[int, nn.Module] = {}

    def takes(self, number: int) -> bool:
        """Return whether a trial, which the study knows to be complete, is among the best."""
        return number in self._best_numbers()

    def add(self, number: int, model: nn.Module) -> None:
        """Add a trial that `takes` accepted, and remove those that are no longer among the best."""
        numbers = self._best_numbers()
        self.models = {key: other for key, other in self.models.items() if key in numbers} | {number: model}

    def _best_numbers(self) -> set[int]:
        """Return the numbers of the best trials of this sweep in the study."""
        numbers = set(self._numbers)
        if len(self._study.directions) == 1:
            with contextlib.suppress(ValueError):
                # Storages differ in which of several equal trials is the best.
                if (best := self._study.best_trial.number) in numbers:
                    return {best}
        view = study_view(self._study, lambda trials: [trial for trial in trials if trial.number in numbers])
        front = [trial.number for trial in view.best_trials]
        return {*front[: 1 if len(self._study.directions) == 1 else None]}


def any_nan(values: Sequence[float]) -> bool:
    """Return whether any value is NaN. Members with non-finite parameters or losses have NaN values."""
    return any(math.isnan(value) for value in values)

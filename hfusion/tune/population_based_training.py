"""Population based training: the worst trials become copies of the best, with other hyper-parameters.

Jaderberg et al., "Population Based Training of Neural Networks" (2017); names, defaults and choices are those of Ray
Tune's PopulationBasedTraining.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PBT:
    """Population based training: the worst trials of a sweep continue as copies of the best.

    Args:
        interval: epochs between two rounds of copying.
        quantile_fraction: the fraction of an array's trials that are replaced, and of those that are copied; at most
            0.5.
        resample_probability: the probability that a value is drawn from its distribution again.
        perturbation_factors: otherwise a number is multiplied by one of these factors, within its bounds. Categorical
            values stay.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> import hfusion as hf
        >>> pbt = hf.PBT(interval=2, quantile_fraction=0.25)
        >>> pbt.interval
        2
    """

    interval: int = 1
    quantile_fraction: float = 0.25
    resample_probability: float = 0.25
    perturbation_factors: tuple[float, float] = (1.2, 0.8)

    def __post_init__(self) -> None:
        if self.interval < 1 or not 0 < self.quantile_fraction <= 0.5 or not 0 <= self.resample_probability <= 1:
            raise ValueError(f"{self}: interval at least 1, quantile_fraction to 0.5, resample_probability from 0 to 1")
        if not isinstance(self.interval, int):
            raise ValueError(f"interval={self.interval!r}: give a whole number of epochs")
        if not self.perturbation_factors or not all(0 < factor < math.inf for factor in self.perturbation_factors):
            raise ValueError(f"perturbation_factors={self.perturbation_factors!r}: give numbers above 0")

    def pairs(self, values: Mapping[str, float], draw: random.Random) -> list[tuple[str, str]]:
        """Return the tags ``(source, target)`` of trials to copy, by their ``values``; higher is better."""
        count = min(math.ceil(len(values) * self.quantile_fraction), len(values) // 2)
        ranked = sorted(values, key=lambda tag: values[tag])
        return [(draw.choice(ranked[len(ranked) - count :]), worst) for worst in ranked[:count]]

    def explored(
        self,
        params: Mapping[str, Any],
        distributions: Mapping[str, Any],
        allowed: Callable[[dict[str, Any]], bool],
        draw: random.Random,
    ) -> dict[str, Any]:
        """Return perturbed values of a trial's suggestions. Changes that are not ``allowed`` are skipped."""
        perturbed = dict(params)
        for name, distribution in distributions.items():
            changed = {**perturbed, name: self._explored(perturbed[name], distribution, draw)}
            if allowed(changed):
                perturbed = changed
        return perturbed

    def _explored(self, value: Any, distribution: Any, draw: random.Random) -> Any:
        choices = getattr(distribution, "choices", None)
        if draw.random() < self.resample_probability:
            return draw.choice(choices) if choices is not None else _resampled(distribution, draw)
        factor = draw.choice(self.perturbation_factors)
        return value if choices is not None else _bounded(value * factor, distribution)


def _resampled(distribution: Any, draw: random.Random) -> float | int:
    low, high = distribution.low, distribution.high
    if distribution.log:
        return _bounded(math.exp(draw.uniform(math.log(low), math.log(high))), distribution)
    return _bounded(draw.uniform(low, high), distribution)


def _bounded(value: float, distribution: Any) -> float | int:
    """Return the nearest number that the distribution contains."""
    low, high, step = distribution.low, distribution.high, distribution.step
    if step is not None:
        value = low + round((value - low) / step) * step
    value = min(max(value, low), high)
    return int(value) if isinstance(low, int) else float(value)

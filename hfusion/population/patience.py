"""Early stopping, member by member: who has not got better for too long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hfusion.population.population import Population


class Patience:
    """Tells which members have not improved a metric for more than ``patience`` calls.

    ``mode``: whether less or more is better. ``least``: an improvement is one of more than this. What is known of a
    member hangs on its tag, so that it may change its row.

    Example:
        >>> patience = Patience(5, mode="max")
        >>> # for row in patience(pop, pop.evaluate(accuracy, loader)): pop.stop(row)
    """

    def __init__(self, patience: int, *, mode: Literal["min", "max"] = "min", least: float = 0.0) -> None:
        if patience < 0 or mode not in ("min", "max") or least < 0:
            raise ValueError(f"patience={patience}, mode={mode!r}, least={least}: at least 0, min or max, at least 0")
        self._patience, self._sign, self._least = patience, 1 if mode == "min" else -1, least
        self._best: dict[str, float] = {}
        self._waited: dict[str, int] = {}

    def __call__(self, population: Population, metrics: Tensor | Sequence[float]) -> list[int]:
        """The rows of members whose patience is over, given a metric ``[rows]``; NaN is no improvement."""
        values = (metrics if isinstance(metrics, Tensor) else torch.as_tensor(metrics, dtype=torch.float64)).tolist()
        if len(values) != len(population):
            raise ValueError(f"{len(values)} metrics for a population of {len(population)} rows: give one for each row")
        over = []
        for row, tag in enumerate(population.tags):
            if tag is None:
                continue
            value = self._sign * values[row]
            if value < self._best.get(tag, math.inf) - self._least:
                self._best[tag], self._waited[tag] = value, 0
            else:
                self._waited[tag] = self._waited.get(tag, 0) + 1
            if self._waited[tag] > self._patience:
                over.append(row)
        return over

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self._best), "waited": dict(self._waited)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._best, self._waited = dict(state_dict["best"]), dict(state_dict["waited"])

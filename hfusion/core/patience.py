"""Early stopping, member by member: who has not got better for too long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor


def numbers(metrics: Tensor | Sequence[float], rows: int) -> list[float]:
    """A metric for each row, as Python floats. Raises ValueError for another number of them."""
    if not isinstance(metrics, Tensor):
        metrics = torch.tensor(metrics, dtype=torch.float64, device="cpu")
    values: list[float] = metrics.tolist()
    if len(values) != rows:
        raise ValueError(f"{len(values)} metrics for a population of {rows} rows: give one for each row")
    return values


def is_better(value: float, best: float, mode: str, least: float) -> bool:
    """Compare as Keras and Lightning do: better by more than ``least``. NaN is worse than any number."""
    if mode == "max":
        value, best = -value, -best
    return value + least < (math.inf if math.isnan(best) else best)


class TaggedMembers(Protocol):
    """What `Patience` needs of a population."""

    @property
    def tags(self) -> Sequence[str | None]: ...

    @property
    def best(self) -> Any: ...

    def __len__(self) -> int: ...


class Patience:
    """Tells which members have not improved a metric for ``patience`` calls in a row.

    `hfusion.Task` takes one, too, for the losses of its evaluations.

    Counts as Keras and Lightning do: the first metric that is no improvement is 1, so that 0 and 1 mean the same.

    Args:
        patience: so many metrics in a row without an improvement end a member.
        mode: whether less or more is better.
        least: an improvement is one of more than this, as ``min_delta`` elsewhere.
        restore_best: keep each member's best weights on its device (``population.best``), and write them into a member
            when its patience is over. Counts are kept there, too: they follow members that are copied, and are saved
            by `Population.save`. Otherwise they belong to the member's tag, and are in `state_dict`.

    Example:
        >>> patience = Patience(5, mode="max", restore_best=True)
        >>> # for row in patience(pop, pop.evaluate(accuracy, loader)): pop.stop(row)
    """

    def __init__(
        self,
        patience: int,
        *,
        mode: Literal["min", "max"] = "min",
        least: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        if patience < 0 or mode not in ("min", "max") or not least >= 0:
            raise ValueError(f"patience={patience}, mode={mode!r}, least={least}: at least 0, min or max, at least 0")
        self._patience = max(patience, 1)
        self.mode, self.least, self.restore_best = mode, least, restore_best
        self._best: dict[str, float] = {}
        self._waited: dict[str, int] = {}

    def __call__(self, population: TaggedMembers, metrics: Tensor | Sequence[float]) -> list[int]:
        """The rows of members whose patience is over, given a metric ``[rows]``; NaN is no improvement."""
        values = numbers(metrics, len(population))
        if self.restore_best:
            population.best.update(values, mode=self.mode, least=self.least)
            waited: Sequence[int] = population.best.waited.tolist()
        else:
            waited = [0 if tag is None else self.count(tag, values[row]) for row, tag in enumerate(population.tags)]
        over = [row for row, count in enumerate(waited) if self.is_over(count)]
        if self.restore_best:
            population.best.restore(over)
        return over

    def count(self, tag: str, value: float) -> int:
        """How many metrics of a member in a row were no improvement, ``value`` included: 0 for an improvement."""
        value = -value if self.mode == "max" else value
        if is_better(value, self._best.get(tag, math.nan), "min", self.least):
            self._best[tag], self._waited[tag] = value, 0
        else:
            self._waited[tag] = self._waited.get(tag, 0) + 1
        return self._waited[tag]

    def is_over(self, waited: int) -> bool:
        """Return whether so many metrics in a row without an improvement end a member."""
        return waited >= self._patience

    def renewed(self) -> Patience:
        """One that counts alike, and has counted nothing."""
        return Patience(self._patience, mode=self.mode, least=self.least, restore_best=self.restore_best)

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self._best), "waited": dict(self._waited)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._best, self._waited = dict(state_dict["best"]), dict(state_dict["waited"])

"""Early stopping, member by member: who has not got better for too long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from hfusion.population.best import is_better, numbers

if TYPE_CHECKING:
    from hfusion.population.any_models import Population


class Patience:
    """Tells which members have not improved a metric for ``patience`` calls in a row.

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
        self._patience, self._mode, self._least, self._restores = max(patience, 1), mode, least, restore_best
        self._best: dict[str, float] = {}
        self._waited: dict[str, int] = {}

    def __call__(self, population: Population, metrics: Tensor | Sequence[float]) -> list[int]:
        """The rows of members whose patience is over, given a metric ``[rows]``; NaN is no improvement."""
        values = numbers(metrics, len(population))
        if self._restores:
            population.best.update(values, mode=self._mode, least=self._least)
            waited: Sequence[int] = population.best.waited.tolist()
        else:
            waited = [0 if tag is None else self._count(tag, values[row]) for row, tag in enumerate(population.tags)]
        over = [row for row, count in enumerate(waited) if count >= self._patience]
        if self._restores:
            population.best.restore(over)
        return over

    def _count(self, tag: str, value: float) -> int:
        """How many metrics of a member in a row were no improvement, ``value`` included."""
        value = -value if self._mode == "max" else value
        if is_better(value, self._best.get(tag, math.nan), "min", self._least):
            self._best[tag], self._waited[tag] = value, 0
        else:
            self._waited[tag] = self._waited.get(tag, 0) + 1
        return self._waited[tag]

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self._best), "waited": dict(self._waited)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._best, self._waited = dict(state_dict["best"]), dict(state_dict["waited"])

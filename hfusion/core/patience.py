"""Early stopping of each member whose value has not improved for too long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from hfusion.core.member_table import is_row


def numbers(name: str, values: Tensor | Sequence[float], rows: int) -> list[float]:
    """Return a number for each row, in double precision. Raises ValueError, with ``name``, for other values."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().reshape(-1).tolist()
    try:
        found = [float(value.detach() if isinstance(value, Tensor) else value) for value in values]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={values!r}: give a number for each of {rows} rows") from error
    if len(found) != rows:
        raise ValueError(f"{name} has {len(found)} values for {rows} rows: give one for each")
    return found


def is_better(value: float, best: float, mode: str, least: float) -> bool:
    """Compare as Keras and Lightning do: better by more than ``least``. NaN is worse than any number."""
    if mode == "max":
        value, best = -value, -best
    return value + least < (math.inf if math.isnan(best) else best)


class Patience:
    """Early stopping for each member: report members whose metric has not improved for ``patience`` calls.

    Pass one to `hfusion.Task` to stop its members by their evaluation losses. Counts are those of Keras and Lightning:
    the first metric without an improvement counts as 1, so that 0 and 1 mean the same.

    Args:
        patience: the number of consecutive metrics without an improvement after which a member ends.
        mode: ``"min"`` or ``"max"``: whether lower or higher metrics are better.
        least: an improvement must be larger than this, as ``min_delta`` in Keras.
        restore_best: keep each member's best weights on its device (``population.best``), and write them back when its
            patience is over. Counts then belong to rows: they follow members that are copied, and `Population.save`
            saves them. Otherwise they belong to members' tags, and are in `state_dict`.

    Example:
        >>> patience = Patience(5, mode="max", restore_best=True)
        >>> # for row in patience(pop, pop.evaluate(accuracy, loader)): pop.stop(row)
    """

    def __init__(
        self, patience: int, *, mode: Literal["min", "max"] = "min", least: float = 0.0, restore_best: bool = False
    ) -> None:
        if not is_row(patience) or patience < 0 or mode not in ("min", "max") or not least >= 0:
            raise ValueError(f"patience={patience}, mode={mode!r}, least={least}: at least 0, min or max, at least 0")
        self._patience = max(patience, 1)
        self.mode, self.least, self.restore_best = mode, least, restore_best
        self._best: dict[str, float] = {}
        self._waited: dict[str, int] = {}

    def __call__(self, population: Any, metrics: Tensor | Sequence[float]) -> list[int]:
        """The rows of members whose patience is over, given a metric ``[rows]``; NaN is no improvement."""
        values = numbers("metrics", metrics, len(population))
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
        """Return a member's number of consecutive metrics without an improvement, with ``value`` as the latest."""
        value = -value if self.mode == "max" else value
        if is_better(value, self._best.get(tag, math.nan), "min", self.least):
            self._best[tag], self._waited[tag] = value, 0
        else:
            self._waited[tag] = self._waited.get(tag, 0) + 1
        return self._waited[tag]

    def is_over(self, waited: int) -> bool:
        """Return whether a member ends after this many consecutive metrics without an improvement."""
        return waited >= self._patience

    def renewed(self) -> Patience:
        """Return a copy of the settings, without counts."""
        return Patience(self._patience, mode=self.mode, least=self.least, restore_best=self.restore_best)

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self._best), "waited": dict(self._waited)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._best, self._waited = dict(state_dict["best"]), dict(state_dict["waited"])

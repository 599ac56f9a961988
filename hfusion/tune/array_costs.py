"""Costs of arrays of trials relative to plain trials, measured in earlier sweeps on this machine.

It is kept in the user's cache folder, a row for each array that was measured. Whoever has no row yet begins with plain
trials and the two priors below, and measures in the sweep itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hfusion.device.cache import cache_file, number, read_json, write_json
from hfusion.device.calibrate import describe

# Rows that a file has, the latest, and those of the nearest size that an estimate is made of.
_MAX_ROWS, _NEAREST = 128, 5
# Where nothing was measured: seconds of captures, and an array's step in units of what `PlainFootprint` estimates.
_FIRST_STARTUP, _FIRST_RATIO = 1.0, 1.7
_PLAUSIBLE = (1e-6, 1e6)


@dataclass(frozen=True)
class ArrayRecord:
    """An array that was measured after its trials were plain.

    Attributes:
        operators: of one forward of a member.
        startup: seconds of captures and checks.
        plain: a minibatch of one plain trial, in units of its estimate.
        ratio: a minibatch of the array to that of a plain trial, in units of the estimated ratio.
    """

    operators: int
    startup: float
    plain: float
    ratio: float


class ArrayCosts:
    """Estimates from the records of arrays on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._description = describe(device)
        self._records = self._read()

    def startup(self, operators: int) -> float:
        """Seconds until an array of models of so many operators is captured and checked."""
        # A larger program may take more in proportion; that a smaller one takes less is not known.
        scaled = self._median(operators, lambda record: record.startup * max(1.0, operators / record.operators))
        return _FIRST_STARTUP if scaled is None else scaled

    def ratio(self, operators: int) -> float:
        """Return the measured ratio of an array's step to a plain one, over the estimated ratio."""
        measured = self._median(operators, lambda record: record.ratio)
        return _FIRST_RATIO if measured is None else measured

    def plain(self, operators: int) -> float | None:
        """Return the measured time of a plain trial over its estimate; None if never measured."""
        return self._median(operators, lambda record: record.plain)

    def note(self, record: ArrayRecord) -> None:
        """Keep a row more, if the folder takes it."""
        # The latest are first, and so are preferred where sizes are equal.
        self._records = [record, *self._read()][:_MAX_ROWS]
        try:
            write_json(self._path(), {"arrays": [asdict(row) for row in self._records]})
        except OSError:
            return

    def _median(self, operators: int, value: Callable[[ArrayRecord], float]) -> float | None:
        def distance(record: ArrayRecord) -> float:
            return max(record.operators, operators) / max(1, min(record.operators, operators))

        nearest = sorted(self._records, key=distance)[:_NEAREST]
        return median(map(value, nearest)) if nearest else None

    def _read(self) -> list[ArrayRecord]:
        try:
            return [_record(row) for row in read_json(self._path())["arrays"]]
        except (OSError, ValueError, LookupError, TypeError):
            return []

    def _path(self) -> Path:
        return cache_file("trial-arrays", self._description)


def _record(row: Mapping[str, Any]) -> ArrayRecord:
    seconds = (number(row[key], *_PLAUSIBLE) for key in ("startup", "plain", "ratio"))
    return ArrayRecord(int(number(row["operators"], 1, 1e9)), *seconds)

"""Costs of arrays of trials relative to plain trials, measured in earlier sweeps on this machine.

It is kept in the user's cache folder, a row for each array that was measured. Whoever has no row yet begins with plain
trials and the two priors below, and measures in the sweep itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from hfusion.device.calibrate import describe
from hfusion.device.measured_records import RecordFile, nearest

# Where nothing was measured: seconds of captures, and an array's step in units of what `PlainFootprint` estimates.
_FIRST_STARTUP, _FIRST_RATIO = 1.0, 1.7


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
        self._file = RecordFile(ArrayRecord, "trial-arrays", describe(device))
        self._records = self._file.read()

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
        self._records = [*self._file.read(), record]
        self._file.add(record)

    def _median(self, operators: int, value: Callable[[ArrayRecord], float]) -> float | None:
        records = nearest(self._records, operators)
        return median(map(value, records)) if records else None

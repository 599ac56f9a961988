"""Costs of arrays of trials, measured in earlier sweeps on this machine.

They are kept in the user's cache folder, a row for each array that was measured. Where there are few rows, sweeps begin
with plain trials, measure these, and estimate arrays by priors, which no single measurement outvotes: one that was made
while the machine did something else would otherwise keep trials from ever being an array again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from hfusion.device.calibrate import describe
from hfusion.device.measured_records import RecordFile, nearest

# Where nothing was measured: seconds of captures, and an array's step in units of its estimate, as of MLPs on two cores
# of an EPYC.
_FIRST_STARTUP, _FIRST_FACTOR = 2.4, 1.9
# Rows of which the median is taken; priors stand for those that are missing.
_ENOUGH = 3


@dataclass(frozen=True)
class ArrayRecord:
    """An array that was measured after its trials were plain.

    Attributes:
        operators: of one forward of a member.
        startup: seconds of captures and checks.
        plain: a minibatch of one plain trial, in units of its estimate.
        factor: a minibatch of the array, in units of its estimate from that of a plain trial.
    """

    operators: int
    startup: float
    plain: float
    factor: float


class ArrayCosts:
    """Estimates from the records of arrays on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._file = RecordFile(ArrayRecord, "trial-arrays", describe(device))
        self._records = self._file.read()

    def startup(self, operators: int) -> float:
        """Seconds until an array of models of so many operators is captured and checked."""
        # A larger program may take more in proportion; that a smaller one takes less is not known.
        return self._median(
            operators, lambda record: record.startup * max(1.0, operators / record.operators), _FIRST_STARTUP
        )

    def factor(self, operators: int) -> float:
        """Return the measured time of an array's step over its estimate."""
        return self._median(operators, lambda record: record.factor, _FIRST_FACTOR)

    def plain(self, operators: int) -> float | None:
        """Return the measured time of a plain trial over its estimate; None if it was measured too seldom."""
        measured = [record.plain for record in nearest(self._records, operators)]
        return median(measured) if len(measured) >= _ENOUGH else None

    def note(self, record: ArrayRecord) -> None:
        """Keep a row more, if the folder takes it."""
        self._records = [*self._file.read(), record]
        self._file.add(record)

    def _median(self, operators: int, value: Callable[[ArrayRecord], float], prior: float) -> float:
        measured = list(map(value, nearest(self._records, operators)))
        return median(measured + [prior] * (_ENOUGH - len(measured)))

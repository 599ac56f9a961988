"""Costs of arrays of trials, measured in earlier sweeps on this machine.

They are stored in the user's cache folder, one record per measured array. While there are few records, sweeps begin
with plain trials, measure them, and estimate arrays from priors. Medians with these priors prevent that one bad
measurement, made while the machine was busy, rules out arrays for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from hfusion.device.calibrate import describe
from hfusion.device.measured_records import RecordFile, nearest

# Priors: seconds of captures, and the measured over the estimated time of an array's step, both of MLPs on two cores of
# an EPYC.
_FIRST_STARTUP, _FIRST_FACTOR = 2.4, 1.9
# The median is taken of at least so many records; priors replace missing ones.
_ENOUGH = 3


@dataclass(frozen=True)
class ArrayRecord:
    """An array that was measured after its trials were plain.

    Attributes:
        operators: number of operators in one forward of a member.
        startup: seconds of captures and checks.
        plain: measured over estimated time of a minibatch of one plain trial.
        factor: measured time of a minibatch of the array, over its estimate from the measured plain trial.
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
        """Return the seconds until an array of models with this number of operators is captured and checked."""
        # Scale up for larger programs, but not down for smaller ones, which were not shown to take less.
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
        """Add a record, also to the file if the cache folder can be written."""
        self._records = [*self._file.read(), record]
        self._file.add(record)

    def _median(self, operators: int, value: Callable[[ArrayRecord], float], prior: float) -> float:
        measured = list(map(value, nearest(self._records, operators)))
        return median(measured + [prior] * (_ENOUGH - len(measured)))

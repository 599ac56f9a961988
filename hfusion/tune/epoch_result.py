"""The result of an epoch of an array."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EpochResult:
    """The values and times of an epoch of an array.

    Attributes:
        values: the values of each member, by its tag: empty if no values were requested, NaN if training diverged.
        seconds: of the epoch.
        steps: the number of minibatches.
    """

    values: dict[str, tuple[float, ...]]
    seconds: float
    steps: int

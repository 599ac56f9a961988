"""The size of a sweep."""

from __future__ import annotations

from dataclasses import dataclass

from hfusion.tune.population_based_training import PBT


@dataclass(frozen=True)
class Extent:
    """Size of a sweep: ``trials``, ``epochs``, the most concurrent ``rows``; and the exceptions that fail a trial only.

    After ``deadline``, of time.monotonic, no more trials are asked. ``processes``: how many train, of a machine.
    """

    trials: int
    epochs: int
    rows: int | None
    seed: int
    catch: tuple[type[BaseException], ...]
    pbt: PBT | None
    deadline: float
    processes: int = 1

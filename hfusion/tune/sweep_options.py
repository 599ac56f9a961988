"""The size of a sweep."""

from __future__ import annotations

from dataclasses import dataclass

from hfusion.tune.population_based_training import PBT


@dataclass(frozen=True)
class Extent:
    """The size and limits of a sweep.

    Attributes:
        rows: the maximum number of concurrent trials; None: as many as lower the time per trial.
        catch: exceptions that fail their trial only.
        deadline: the time, by time.monotonic, after which no more trials start.
        processes: the number of processes of one machine that train.
    """

    trials: int
    epochs: int
    rows: int | None
    seed: int
    catch: tuple[type[BaseException], ...]
    pbt: PBT | None
    deadline: float
    processes: int = 1

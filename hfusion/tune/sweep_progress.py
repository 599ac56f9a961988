"""Progress of a sweep: a bar like in study.optimize, and a log line after every round."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna import Study

_log = logging.getLogger(__name__)


class SweepProgress:
    """Shows how many of ``trials`` have finished, and the best value so far.

    Args:
        shown: whether to draw a bar; without one only the log is written.
    """

    def __init__(self, study: Study, trials: int, *, shown: bool) -> None:
        self._study = study
        self._bar: Any = None
        if shown:
            # tqdm is a dependency of Optuna.
            from tqdm.auto import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=trials)

    def round(self, number: int, finished: int, training: int, arrays: int, seconds: float) -> None:
        """Log the end of a round, with counts of trials and arrays, and update the bar."""
        best = self._best()
        _log.info(
            "round %d: %d trials finished, %d training in %d arrays, %.2f s. %s",
            number,
            finished,
            training,
            arrays,
            seconds,
            best,
        )
        if self._bar is not None:
            self._bar.set_description(best)
            self._bar.update(finished - self._bar.n)

    def close(self) -> None:
        """Close the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()

    def _best(self) -> str:
        if len(self._study.directions) > 1:
            count = len(self._study.best_trials)
            return f"{count} trial{'s' * (count != 1)} on the Pareto front."
        try:
            best = self._study.best_trial
        except ValueError:
            return "No trial is complete."
        return f"Best trial: {best.number}. Best value: {best.value:.6g}"

"""The result of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from hfusion.core.text import folded, html_table
from hfusion.tune.study import SUGGESTED, as_trained, study_view

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

# The most trials and the width of a printed result.
_BEST, _WIDTH = 10, 100


@dataclass(frozen=True, eq=False, repr=False)
class SweepResult:
    """The study of a sweep, and the models of its best completed trials. ``print`` shows the best trials.

    With several objectives, ``best_trials`` and ``best_models`` hold the Pareto front; ``best_trial``, ``best_params``,
    ``best_value`` and ``best_model`` raise RuntimeError, as in Optuna.

    With population based training, ``params`` of a trial are those it was trained with last. What it suggested first is
    in its user attribute ``hfusion:suggested`` and in the ``study``.

    ``numbers``: the numbers of the trials that this sweep started. ``processes``: how many processes trained its
    arrays, 1 or one for each device of the machine or cluster.

    Example:
        >>> import torch, hfusion as hf
        >>> result = hf.sweep(
        ...     lambda: torch.nn.Linear(2, 1),
        ...     lambda trial: {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)},
        ...     torch.nn.functional.mse_loss,
        ...     [(torch.zeros(4, 2), torch.ones(4, 1))],
        ...     trials=2,
        ...     epochs=1,
        ...     processes=0,
        ... )
        >>> len(result.study.trials), type(result.best_model).__name__
        (2, 'Linear')
    """

    study: Study
    numbers: tuple[int, ...]
    _best: dict[int, nn.Module]
    processes: int = 1

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials of the sweep, in the order in which they started."""
        trials = self.study.get_trials(deepcopy=False)
        return [as_trained(trials[number], self.study) for number in self.numbers]

    @property
    def best_trial(self) -> FrozenTrial:
        """The best trial of the study. Raises ValueError if no trial is complete, as Optuna does."""
        return as_trained(self.study.best_trial, self.study)

    @property
    def best_trials(self) -> list[FrozenTrial]:
        """The trials of the study that no other trial dominates: the Pareto front."""
        return [as_trained(trial, self.study) for trial in self.study.best_trials]

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters with which the best trial of the study was trained last."""
        return self.best_trial.params

    @property
    def best_value(self) -> float:
        """Value of the best trial of the study."""
        return self.study.best_value

    @property
    def best_model(self) -> nn.Module:
        """The model of the best trial that this sweep completed, on the CPU. Raises ValueError if there is none."""
        if len(self.study.directions) > 1:
            raise RuntimeError(
                f"a sweep of {len(self.study.directions)} objectives has no single best model: use best_models, by the "
                "numbers of best_trials"
            )
        if not self._best:
            raise ValueError(
                "no trial of this sweep is complete within its constraints, so it has no best model: see print(result)"
            )
        return next(iter(self._best.values()))

    @property
    def best_models(self) -> dict[int, nn.Module]:
        """The models of the best trials that this sweep completed, on the CPU, by trial number.

        With one objective there is one; with several, those that no other trial of this sweep dominates.
        """
        return dict(sorted(self._best.items()))

    def trials_dataframe(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trials of this sweep as a pandas frame, as optuna.Study.trials_dataframe does.

        The columns of parameters have the values with which trials were trained last. Raises ImportError without
        pandas.
        """
        return self._as_trained().trials_dataframe(*args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return ``plot_*`` of optuna.visualization, for the trials of the sweep. Calls need plotly."""
        if not name.startswith("plot_"):
            raise AttributeError(f"SweepResult has no attribute {name!r}")
        plots = import_module("optuna.visualization")
        if not hasattr(plots, name):
            raise AttributeError(f"optuna.visualization has no {name!r}")
        return partial(getattr(plots, name), self._as_trained())

    def _as_trained(self) -> Any:
        """Return a view of the study that contains only the trials of this sweep."""
        return study_view(self.study, self.trials)

    def _headline(self, trials: list[FrozenTrial]) -> str:
        states = [trial.state.name.lower() for trial in trials]
        counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states))]
        return f"sweep {self.study.study_name!r}  {len(trials)} trials" + (f": {', '.join(counts)}" if counts else "")

    def _rows(self, trials: list[FrozenTrial]) -> list[list[str]]:
        """Return the table cells of the best trials, one row per trial."""
        rows = []
        for trial in self._ranked(trials)[:_BEST]:
            values = [f"{value:.6g}" for value in trial.values]
            epochs = [str(len(trial.intermediate_values))] if len(values) == 1 else []
            rows.append([str(trial.number), *values, *epochs, _params(trial)])
        return rows

    def __str__(self) -> str:
        trials = self.trials
        rows = self._rows(trials)
        shown = [self._columns, *rows] if rows else []
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in shown]
        cut = [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..." for line in lines]
        return "\n".join([self._headline(trials), *cut])

    def __repr__(self) -> str:
        return f"<{self._headline(self.trials)}>"

    def _repr_html_(self) -> str:
        trials = self.trials
        rows = self._rows(trials)
        return folded(self._headline(trials), html_table(self._columns, rows, len(rows)), is_open=True)

    @property
    def _columns(self) -> list[str]:
        count = len(self.study.directions)
        if count == 1:
            return ["trial", "value", "epochs", "params"]
        # The same column names as in trials_dataframe.
        names = self.study.metric_names or range(count)
        return ["trial", *(f"values_{name}" for name in names), "params"]

    def _ranked(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        """Return the complete trials, best first; with several objectives, those on the Pareto front."""
        numbers = self.best_models.keys()
        complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
        if len(self.study.directions) > 1:
            return [trial for trial in complete if trial.number in numbers]
        sign = -1.0 if self.study.direction.name == "MAXIMIZE" else 1.0
        return sorted(complete, key=lambda trial: (trial.number not in numbers, sign * (trial.value or 0.0)))


def _params(trial: FrozenTrial) -> str:
    """Format a trial's last parameters, with the suggested values where they differ."""
    suggested = trial.user_attrs.get(SUGGESTED, trial.params)
    return ", ".join(
        f"{key}={_short(value)}" + (f" (first {_short(suggested[key])})" if suggested.get(key, value) != value else "")
        for key, value in trial.params.items()
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

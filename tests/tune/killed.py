"""A sweep in a folder that is killed at a chosen event: ``python -m tests.tune.killed FOLDER EVENT COUNT``.

Events: ``asked``, before the COUNT-th trial suggests anything; ``suggested``, when it has suggested a part; ``judged``,
before the COUNT-th value; ``reported``, when it is in the study; ``pruned`` and ``kept``, when the pruner has noted
it, and the state of the trial is not in the study yet.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import optuna
import torch.nn.functional as F
from torch import Tensor

import hfusion as hf
from hfusion.tune import trial_placement
from tests.tune.cases import sweep

TRIALS = 12


class Halving(optuna.pruners.BasePruner):
    """Optuna's successive halving, watched."""

    def __init__(self, reached: Callable[[str], None]) -> None:
        self._pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
        self._reached = reached

    def prune(self, study: Any, trial: Any) -> bool:
        self._reached("reported")
        decision = self._pruner.prune(study, trial)
        self._reached("pruned" if decision else "kept")
        return decision


def samplers() -> dict[str, Any]:
    return {
        "random": optuna.samplers.RandomSampler(seed=5),
        "tpe": optuna.samplers.TPESampler(seed=5, n_startup_trials=4, multivariate=True),
    }


def run(folder: str, reached: Callable[[str], None], sampler: str = "tpe", **options: Any) -> hf.SweepResult:
    """Run or resume the sweep in ``folder``. ``reached`` is called with the name of every event."""

    def space(trial: optuna.Trial) -> dict[str, Any]:
        reached("asked")
        rate = trial.suggest_float("lr", 1e-4, 0.3, log=True)
        reached("suggested")
        return {"lr": rate, "hidden": trial.suggest_categorical("hidden", [4, 8])}

    def judged(output: Tensor, target: Tensor) -> Tensor:
        reached("judged")
        return F.cross_entropy(output, target)

    arguments = {"trials": TRIALS, "rows": 5, "sampler": samplers()[sampler], "pruner": Halving(reached)}
    return sweep(**{**arguments, "space": space, "metric": judged, "directory": folder, **options})


def at(event: str, count: int, act: Callable[[], None]) -> Callable[[str], None]:
    """Return a function that calls ``act`` when ``event`` is reached for the ``count``-th time."""
    counts: Counter[str] = Counter()

    def reached(name: str) -> None:
        counts[name] += 1
        if name == event and counts[name] == count:
            act()

    return reached


def everything(result: hf.SweepResult) -> list[Any]:
    """Return the results that must be equal whether or not the sweep was killed."""
    trials = [
        (
            trial.number,
            trial.params,
            trial.state.name,
            trial.values,
            trial.intermediate_values,
            trial.user_attrs["hfusion:round"],
        )
        for trial in result.study.trials
    ]
    return [
        trials,
        result.numbers,
        result.best_value,
        [value.tolist() for value in result.best_model.state_dict().values()],
    ]


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # As in the tests: arrays, however small.
    trial_placement.seconds_saved = lambda *args: math.inf
    run(sys.argv[1], at(sys.argv[2], int(sys.argv[3]), lambda: os.kill(os.getpid(), signal.SIGKILL)))

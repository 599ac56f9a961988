"""A sweep without training, killed after each of its writes into the study in turn, ends as if it had not been."""

from __future__ import annotations

import random
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")
from hfusion.tune.study import Draws  # noqa: E402
from hfusion.tune.trials import Decision, Trials  # noqa: E402

TRIALS, ROWS, EPOCHS = 10, 4, 4
WRITES = (
    "create_new_trial",
    "set_trial_param",
    "set_trial_state_values",
    "set_trial_intermediate_value",
    "set_trial_user_attr",
    "set_trial_system_attr",
)


class Killed(BaseException):
    pass


class Mortal(optuna.storages.InMemoryStorage):  # type: ignore[misc,name-defined]
    """Ends the process after so many writes."""

    remaining_writes = -1

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if name not in WRITES:
            return attribute

        def write(*args: Any, **kwargs: Any) -> Any:
            result = attribute(*args, **kwargs)
            self.remaining_writes -= 1
            if self.remaining_writes == 0:
                raise Killed
            return result

        return write


def value(number: int, step: int) -> float:
    drawn = random.Random(100 * number + step).random()
    return float("nan") if drawn < 0.05 else drawn


def play(storage: Any, saved: dict[str, Any], sampler: Any, pruner: Any) -> None:
    """Rounds as those of `SweepRunner`, with values from a table; ``saved`` is written after each."""
    study = optuna.create_study(study_name="s", storage=storage, sampler=sampler, pruner=pruner, load_if_exists=True)
    draws = Draws(study, saved.get("base"))
    saved.setdefault("base", draws.base)
    seats: dict[int, int] = dict(saved.get("seats", {}))
    trials = Trials(
        study, "run", draws, asked_numbers=saved.get("asked", ()), attributes=saved.get("attributes"), alone=True
    )
    trials.resume(seats)
    resumed = bool(seats)
    while True:
        if not resumed:
            while len(seats) < ROWS and len(trials.asked_numbers) < TRIALS:
                trial = trials.ask()
                if trial is None:
                    continue
                if trial.suggest_float("x", 0, 1) + trial.suggest_float("y", 0, 1) < 0.3:
                    trials.end(trial.number, Decision.PRUNED)
                    continue
                trial.suggest_categorical("z", [1, 2, 3])
                seats[trial.number] = 0
            saved.update(seats=dict(seats), asked=list(trials.asked_numbers), attributes=trials.attributes())
        resumed = False
        if not seats:
            return
        for number, step in list(seats.items()):
            seats[number] += 1
            if trials.report(number, (value(number, step),), step, last=step == EPOCHS - 1) is not Decision.CONTINUE:
                del seats[number]
        trials.caught_up()


def everything(storage: Any) -> list[Any]:
    trials = storage.get_all_trials(0)
    return [
        (
            trial.number,
            trial.params,
            trial.state.name,
            repr(trial.values),
            repr(trial.intermediate_values),
            trial.user_attrs,
        )
        for trial in trials
    ]


class Worst(optuna.pruners.BasePruner):  # type: ignore[misc,name-defined]
    """Prunes a trial that is the worst of several so far: what it says depends much on who was reported before."""

    def prune(self, study: Any, trial: Any) -> bool:
        step = trial.last_step
        values = [
            candidate.intermediate_values[step]
            for candidate in study.get_trials()
            if step in candidate.intermediate_values
        ]
        return len(values) > 1 and trial.intermediate_values[step] == max(values)


@pytest.mark.parametrize("halving", [True, False])
@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_killed_after_every_write(kind: str, halving: bool) -> None:
    makers = {
        "random": lambda: optuna.samplers.RandomSampler(seed=1),
        "tpe": lambda: optuna.samplers.TPESampler(seed=1, n_startup_trials=3, multivariate=True),
    }

    def sampler_and_pruner() -> tuple[Any, Any]:
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2) if halving else Worst()
        return makers[kind](), pruner

    whole = Mortal()
    play(whole, {}, *sampler_and_pruner())
    expected, writes = everything(whole), -1 - whole.remaining_writes
    assert {state for _, _, state, *_ in expected} == {"COMPLETE", "PRUNED", "FAIL"}
    for count in range(1, writes):
        storage, saved = Mortal(), dict[str, Any]()
        storage.remaining_writes = count
        with pytest.raises(Killed):
            play(storage, saved, *sampler_and_pruner())
        # And once more, some writes after it went on.
        storage.remaining_writes = 1 + count % 7
        try:
            play(storage, saved, *sampler_and_pruner())
        except Killed:
            play(storage, saved, *sampler_and_pruner())
        assert everything(storage) == expected, count

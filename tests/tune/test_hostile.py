"""Mistakes and hostile use of a sweep lead to one clear error, a failed trial, or a study that goes on."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.alone import Member, Own
from tests.tune import cases
from tests.tune.cases import accuracy, loaders, make_model

optuna = pytest.importorskip("optuna")


def small(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-4, 0.3, log=True)}


def sweep(space: Callable[[Any], Any] = small, make: Callable[..., nn.Module] = make_model, **options: Any) -> Any:
    return cases.sweep(**{"space": space, "make_model": make, "trials": 4, "epochs": 2, "rows": 4, **options})


def states(study: Any) -> list[str]:
    return [trial.state.name for trial in study.trials]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            lambda t: {**small(t), "depth": 3},
            "trial 0: no function takes .depth. .*: AdamW takes lr, .* takes hidden, ",
        ),
        (lambda t: None, "space gave None for trial 0: return a dict"),
        (lambda t: {"lr": -1.0}, "trial 0: lr of member 0 is -1.0: it must be"),
        (lambda t: {"lr": None}, "trial 0: lr=None is not a number"),
        (lambda t: {"betas": 0.9}, "trial 0: betas=0.9 is not a pair"),
        (lambda t: {"lr": "fast"}, "trial 0: lr='fast' is not a number"),
        (lambda t: {"optimizer.depth": 3}, "trial 0: AdamW takes no 'depth'; it takes lr, betas, eps, weight_decay"),
        (lambda t: {"make_model.depth": 3}, r"make_model\(.*, which got an unexpected keyword argument 'depth'"),
        (lambda t: {"lr": 0.1, "optimizer.lr": 0.1}, "space gives 'lr' to optimizer twice"),
        (lambda t: {"hidden": 4, "make_model.hidden": 8}, "space gives 'hidden' to make_model twice"),
        (lambda t: {"loader.hidden": 4}, "no function takes .loader.hidden. .* loader takes nothing, as"),
        (lambda t: {"batch_size": 4}, r"no function takes 'batch_size' .*: give loader\(batch_size\)"),
        (lambda t: {"loss.alpha": 4}, r"to loss\(.*, which got an unexpected keyword argument 'alpha'"),
        (lambda t: {"optimizer": "adm"}, "trial 0: optimizer='adm' is no optimizer of hf.optim; it has sgd, "),
        (lambda t: {"optimizer": torch.optim.LBFGS}, "optimizer=LBFGS has no counterpart in hf.optim"),
        (lambda t: {"optimizer": 3}, "trial 0: optimizer=3: give a name such as 'adam'"),
        (lambda t: {"optimizer": "sgd", "nesterov": True}, "trial 0: nesterov needs a momentum above 0"),
        (lambda t: {"optimizer": "sgd", "betas": (0.9, 0.99)}, "no function takes 'betas' .*: SGD takes lr, momentum"),
        (lambda t: {"epochs": 0}, "trial 0: epochs=0: give a whole number"),
        (lambda t: {"accumulate": 1.5}, "trial 0: accumulate=1.5: give a whole number"),
        (lambda t: {"clip_norm": -1.0}, "trial 0: clip_norm=-1.0: give a norm above 0, or None"),
    ],
)
def test_invalid_hyperparameters_are_refused(space: Callable[[Any], Any], message: str) -> None:
    study = optuna.create_study()
    with pytest.raises(ValueError, match=message):
        sweep(space, study=study)
    assert states(study) == ["FAIL"]


class Normed(nn.Module):
    """Takes a name that AdamW takes, too."""

    def __init__(self, hidden: int = 8, *, eps: float = 0.5) -> None:
        super().__init__()
        self.layers = make_model(hidden)
        self.norm = nn.LayerNorm(2, eps=eps).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(x))


def by_keywords(**options: Any) -> nn.Module:
    return Normed(**options)


def needs_eps(eps: float) -> nn.Module:
    return Normed(eps=eps)


# What make_model is, what space gives, and the eps of the optimizer and of the model; None where that is an error.
ADDRESSED: list[tuple[Callable[..., nn.Module], dict[str, float], tuple[float, float] | None]] = [
    (Normed, {"eps": 0.1}, None),
    (needs_eps, {"eps": 0.1}, None),
    (Normed, {"optimizer.eps": 0.1}, (0.1, 0.5)),
    (Normed, {"make_model.eps": 0.1}, (1e-8, 0.1)),
    (needs_eps, {"optimizer.eps": 0.3, "make_model.eps": 0.1}, (0.3, 0.1)),
    (by_keywords, {"eps": 0.1}, (0.1, 0.5)),
]


@pytest.mark.parametrize(("make", "values", "expected"), ADDRESSED)
def test_a_name_that_both_take_is_addressed(
    make: Callable[..., nn.Module], values: dict[str, float], expected: tuple[float, float] | None
) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {"lr": 0.1, "optimizer.weight_decay": 0.2, **values}

    if expected is None:
        with pytest.raises(ValueError, match=r"make_model\(.* both take 'eps': .*\"optimizer\.eps\" or \"make_"):
            sweep(space, make)
        return
    result = sweep(space, make, trials=1)
    torch.manual_seed(0)
    model = Normed(eps=expected[1]) if expected[1] else make_model()
    make_optimizer = partial(torch.optim.AdamW, weight_decay=0.2, eps=expected[0])
    member, data = Member(model, make_optimizer, F.cross_entropy, Own(0.1)), loaders()
    for epoch in range(2):
        torch.manual_seed(epoch)
        member.epoch(data["loader"])
    assert result.best_value == pytest.approx(member.judged(data["eval_loader"]), rel=1e-9)


def test_nan_fails_its_trial_alone() -> None:
    """Of a metric, a loss, and a learning rate that explodes."""

    def metric(output: torch.Tensor, target: torch.Tensor) -> float:
        return float("nan") if len(output.unique()) == 1 else float(accuracy(output, target))

    def space(trial: Any) -> dict[str, Any]:
        return {"lr": trial.suggest_categorical("lr", [1e-3, 1e300])}

    result = sweep(space, metric=metric, direction="maximize", trials=8)
    rates = {"FAIL": 1e300, "COMPLETE": 1e-3}
    assert set(states(result.study)) == {"FAIL", "COMPLETE"}
    assert all(trial.params["lr"] == rates[trial.state.name] for trial in result.trials)
    assert result.best_params == {"lr": 1e-3}


def test_a_direction_is_refused_if_the_study_has_one() -> None:
    with pytest.raises(ValueError, match="direction='maximize': the study given has its own"):
        sweep(study=optuna.create_study(), direction="maximize")
    with pytest.raises(ValueError, match=r"study must be an optuna\.Study, or the name of one, got list"):
        sweep(study=[])


def test_errors_of_a_trial() -> None:
    """As in study.optimize, a trial fails, and its error is raised unless caught; TrialPruned prunes."""

    def make(hidden: int) -> nn.Module:
        if hidden == 3:
            raise RuntimeError("three is bad")
        return make_model(hidden)

    def space(trial: Any) -> dict[str, Any]:
        if trial.number == 1:
            raise optuna.TrialPruned
        return {"hidden": trial.number + 1}

    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    with pytest.raises(RuntimeError, match="three is bad") as raised:
        sweep(space, make, study=study, trials=5)
    assert "in trial 2" in raised.value.__notes__[0]
    # Without a folder the other trials cannot be resumed.
    assert states(study) == ["FAIL", "PRUNED", "FAIL"]
    result = sweep(space, make, catch=RuntimeError, trials=5)
    assert states(result.study) == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE", "COMPLETE"]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_errors_of_a_callback_leave_no_trial_running(error: type[BaseException]) -> None:
    called: list[int] = []

    def fail(study: Any, trial: Any) -> None:
        called.append(trial.number)
        raise error

    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    with pytest.raises(error):
        sweep(study=study, callbacks=[fail])
    assert called == [0]
    assert states(study) == ["COMPLETE", "FAIL", "FAIL", "FAIL"]


def test_stale_trials_are_failed_as_in_study_optimize(tmp_path: Path) -> None:
    """By the heartbeats of Optuna's storage, which a sweep records for its own trials."""
    beaten: set[int] = set()

    class Storage(optuna.storages.RDBStorage):  # type: ignore[misc,name-defined]
        def record_heartbeat(self, trial_id: int) -> None:
            beaten.add(trial_id)
            super().record_heartbeat(trial_id)

    with warnings.catch_warnings(action="ignore"):
        storage = Storage(f"sqlite:///{tmp_path}/study", heartbeat_interval=1, grace_period=1)
        study = optuna.create_study(storage=storage)
        stale, other = study.ask(), study.ask()
    storage.record_heartbeat(stale._trial_id)
    time.sleep(2.5)
    beaten.clear()
    result = sweep(study=study, trials=1)
    states = {trial.number: trial.state.name for trial in study.trials}
    assert (states[stale.number], states[other.number]) == ("FAIL", "RUNNING")
    assert states[result.numbers[0]] == "COMPLETE"
    assert beaten == {result.trials[0]._trial_id}

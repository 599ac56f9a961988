"""Populations and sweeps on CUDA make no call that a real device would refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hfusion as hf
from tests.null.arrays import losses_of
from tests.null.calls import calls_per_step, reset, since_reset

pytestmark = pytest.mark.null

ROWS = 4


def mlp(hidden: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 3))


@pytest.mark.parametrize("on_nonfinite", ["ignore", "freeze"])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_members_leave_join_and_are_copied(compile: bool, on_nonfinite: str) -> None:
    reset()
    pop = hf.Population(
        [mlp().cuda() for _ in range(ROWS)],
        optimizer=lambda params: hf.optim.AdamW(params, lr=[0.1, 0.2, 0.3, 0.4]),
        loss=losses_of,
        clip_norm=1.0,
        on_nonfinite=on_nonfinite,  # type: ignore[arg-type]
        compile=compile,
    )
    inputs, target = torch.zeros(6, 8, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")
    for _ in range(3):
        losses = pop.step(inputs, target)
    pop.stop(1)
    pop.step(inputs, target)
    pop.start(1, mlp().cuda(), lr=0.5)
    pop.copy(src=0, dst=[2])
    pop.hparams["lr"][[2]] *= 0.5
    pop.step(inputs, target)
    assert losses.shape == pop.evaluate(losses_of, [(inputs, target)]).shape == (ROWS,)
    pop.stop([0, 1, 2])
    pop.compact()
    pop.step(inputs, target)
    assert {str(param.device) for model in pop.models if model for param in model.parameters()} == {"cuda:0"}
    assert since_reset().refused == ()


def test_a_compiled_step_of_a_population_is_replayed() -> None:
    pop = hf.Population(
        [mlp().cuda() for _ in range(ROWS)],
        optimizer=lambda params: hf.optim.AdamW(params, lr=0.1),
        loss=losses_of,
        on_nonfinite="ignore",
        compile=True,
    )
    inputs, target = torch.zeros(6, 8, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")
    calls = calls_per_step(lambda: pop.step(inputs, target))
    assert (calls.graphs, calls.waits, calls.refused) == (2, 0, ())


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_sweep(compile: bool) -> None:
    optuna = pytest.importorskip("optuna")
    loader = [(torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64))] * 3

    def space(trial: optuna.Trial) -> dict[str, object]:  # type: ignore[name-defined]
        return {
            "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
            "hidden": trial.suggest_categorical("hidden", [8, 16]),
        }

    reset()
    result = hf.sweep(
        mlp,
        space,
        losses_of,
        loader,
        eval_loader=loader,
        pruner=optuna.pruners.NopPruner(),
        trials=6,
        epochs=2,
        machine=hf.Machine([hf.Device("cuda:0", memory="1GiB")]),
        compile=compile,
        clip_norm=1.0,
    )
    assert since_reset().refused == ()
    # Those whose losses are NaN by chance have failed: nothing is computed.
    assert [trial.state.is_finished() for trial in result.study.trials] == [True] * 6

"""Sweeps on a simulated device, whose tensors are counted: never more bytes than its budget.

``python -m tests.tune.memory``
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import optuna
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.simulated.device import install

BUDGETS = (8 << 20, 16 << 20)


class Perceptron(nn.Module):
    """Large enough for rounding to play no part."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layers(x))


def space(trial: Any) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
        "hidden": trial.suggest_categorical("hidden", [128, 192, 256]),
    }


def main() -> int:
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    install()
    from tests.simulated.queues import QUEUES

    loader = [(torch.randn(64, 128), torch.randint(3, (64,))) for _ in range(2)]
    ratios = []
    for budget in BUDGETS:
        machine = hf.Machine([hf.Device("sim:0", memory=budget)])
        # Whose rates are measured in more memory, once.
        machine.calibrate()
        gc.collect()
        before = QUEUES.taken[0]
        QUEUES.start(budget)
        result = hf.sweep(
            Perceptron,
            space,
            F.cross_entropy,
            loader,
            eval_loader=loader,
            sampler=optuna.samplers.RandomSampler(seed=0),
            pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
            trials=16,
            epochs=3,
            rows=16,
            machine=machine,
        )
        assert all(trial.state.is_finished() for trial in result.trials)
        peak = QUEUES.peak[0] - before
        ratios.append(peak / budget)
        rounds = 1 + max(trial.user_attrs["hfusion:round"] for trial in result.trials)
        print(f"{peak:,} of {budget:,} bytes: {ratios[-1]:.3f}; trials began in {rounds} rounds")
        gc.collect()
        print(f"{QUEUES.taken[0] - before:,} bytes are left")
    return not max(ratios) <= 1


if __name__ == "__main__":
    sys.exit(main())

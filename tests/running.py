"""A run in a separate process, which waits in a minibatch: ``python -m tests.running KIND FOLDER MARK``.

It makes the file MARK when it waits, and goes on when that is gone.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.tune.cases import MACHINE, loaders, make_model


def wait(mark: Path) -> None:
    """Make the mark, and wait until it is removed."""
    mark.touch()
    deadline = time.monotonic() + 120
    while mark.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def tasks(heard: Any = None) -> hf.Task:
    torch.manual_seed(0)
    return hf.Task(
        [nn.Linear(3, 2) for _ in range(3)],
        F.mse_loss,
        lambda params: hf.optim.SGD(params, lr=[0.1, 0.2, 0.3]),
        [(torch.ones(4, 3), torch.ones(4, 2))] * 5,
        epochs=4,
        name="lines",
        seed=0,
        callbacks=[] if heard is None else [heard],
    )


def train(folder: Path, heard: Any = None, **options: Any) -> hf.Report:
    return hf.train(tasks(heard), MACHINE, checkpoint=folder, every=2, **options)


def sweep(folder: Path, heard: Any, **options: Any) -> hf.SweepResult:
    import optuna

    def metric(output: Tensor, target: Tensor) -> Tensor:
        heard()
        return F.cross_entropy(output, target)

    return hf.sweep(
        make_model,
        lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 0.3, log=True)},
        F.cross_entropy,
        epochs=3,
        rows=2,
        metric=metric,
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.NopPruner(),
        machine=MACHINE,
        processes=0,
        directory=folder,
        **{"trials": 4, **loaders(), **options},
    )


def main(kind: str, folder: Path, mark: Path) -> None:
    calls = 0

    def metric_called() -> None:
        nonlocal calls
        calls += 1
        # It is called for each trial and epoch: this is of the second trial, in its second epoch.
        if calls == 4:
            wait(mark)

    def heard(event: hf.Step | hf.Evaluation) -> None:
        if isinstance(event, hf.Step) and (event.epoch, event.step) == (1, 2):
            wait(mark)

    if kind == "train":
        train(folder, heard)
    else:
        sweep(folder, metric_called)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

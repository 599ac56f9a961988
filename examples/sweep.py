"""Search the hyper-parameters of a CNN on scikit-learn's handwritten digits, many trials at a time.

    python examples/sweep.py --trials 64 --epochs 9 --directory runs/digits

Optuna's TPE suggests learning rate, weight decay, betas and the number of channels; Hyperband stops trials that do not
improve. Trials with equally many channels are one array, and each is trained exactly as if alone. With ``--directory``
the sweep resumes after Ctrl-C, a crash or a kill: start it again.

    python examples/sweep.py --processes 2
    python examples/sweep.py --ray auto --directory /shared/runs/digits

train the arrays in processes of this machine, or on the nodes of a Ray cluster. Both need ``pip install '.[cluster]'``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import optuna
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import hfusion as hf


def load() -> tuple[Subset[Any], Subset[Any]]:
    """Samples to train with, and to judge by."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    samples = TensorDataset(images, torch.tensor(data.target))
    return Subset(samples, order[:1347]), Subset(samples, order[1347:])


def make_model(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * 4 * 4, 10),
    )


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
        "betas": (trial.suggest_float("beta1", 0.5, 0.95), 0.999),
        "channels": trial.suggest_categorical("channels", [4, 8]),
    }


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).double().mean()


def machine(processes: int | None, ray: str | None) -> hf.Machine | hf.Cluster:
    """Where the arrays are."""
    if ray is not None:
        return hf.Cluster(None if ray == "local" else ray)
    found = hf.Machine.detect()
    if processes is None:
        return found
    memory = found.devices[0].memory // processes
    return hf.Cluster(hf.Machine([hf.Device(f"cpu:{number}", memory=memory) for number in range(processes)]))


def main(arguments: Sequence[str] | None = None) -> hf.SweepResult:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--directory", help="where the sweep is saved, and goes on from")
    parser.add_argument("--rows", type=int, help="the most trials at once; else what pays")
    parser.add_argument("--processes", type=int, help="train in so many processes of this machine")
    parser.add_argument("--ray", metavar="ADDRESS", help='of a Ray cluster, such as "auto"; "local" starts one here')
    options = parser.parse_args(arguments)
    train, judge = load()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    result = hf.sweep(
        make_model,
        space,
        F.cross_entropy,
        DataLoader(train, batch_size=64, shuffle=True),
        eval_loader=DataLoader(judge, batch_size=225),
        metric=accuracy,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.HyperbandPruner(1, options.epochs, 3),
        trials=options.trials,
        epochs=options.epochs,
        machine=machine(options.processes, options.ray),
        rows=options.rows,
        directory=options.directory,
    )
    print(result)
    return result


if __name__ == "__main__":
    main()

"""Cross-validation in one run: an array with a member for each fold, on scikit-learn's handwritten digits.

    python examples/kfold.py --folds 5 --epochs 20

Every member trains on its own part of the data. The parts differ in size, and so do their last minibatches: these are
one step at the end of the epoch, and no sample is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf

BATCH = 64


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def folds(samples: int, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """For each fold which samples it trains on and which it is tested with; sizes differ by one at most."""
    parts = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tensor_split(count)
    return [(torch.cat([*parts[:k], *parts[k + 1 :]]), parts[k]) for k in range(count)]


def minibatches(x: Tensor, y: Tensor, part: Tensor, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """The samples of ``part``, shuffled again in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(x[part], y[part]), BATCH, shuffle=True, generator=generator)


def train(x: Tensor, y: Tensor, parts: Sequence[Tensor], epochs: int, compile: bool = True) -> hf.Population:
    """A population with a member for each of ``parts``, trained on it."""
    torch.manual_seed(0)
    pop = hf.Population(
        [make_model() for _ in parts],
        optimizer=lambda params: hf.optim.Adam(params, lr=1e-3),
        loss=F.cross_entropy,
        tags=[f"fold {k}" for k in range(len(parts))],
        compile=compile,
    )
    loaders = [minibatches(x, y, part, seed) for seed, part in enumerate(parts)]
    for inputs, target, rows in hf.zip_loaders(loaders, epochs=epochs):
        pop.step(inputs, target, rows=rows)
    return pop


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    options = parser.parse_args(arguments)
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    found = folds(len(x), options.folds, seed=0)
    pop = train(x, y, [trained for trained, _ in found], options.epochs, compile=not options.eager)
    accuracies = []
    table = Table("fold", "trained on", "tested on", "accuracy")
    for model, (trained, tested) in zip(pop.models, found, strict=True):
        assert model is not None
        right = (model(x[tested]).argmax(1) == y[tested]).double().mean().item()
        accuracies.append(right)
        table.add_row(str(len(accuracies) - 1), str(len(trained)), str(len(tested)), f"{right:.3f}")
    Console().print(table, f"mean {sum(accuracies) / len(accuracies):.3f}")
    return accuracies


if __name__ == "__main__":
    main()

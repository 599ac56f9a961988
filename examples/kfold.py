"""Cross-validation in one run: an array with a member for each fold, on scikit-learn's handwritten digits.

    python examples/kfold.py --folds 5 --epochs 20

Every member trains on its own part of the data, and the parts have different sizes. `padded` makes one tensor of them
and a mask, so that the loss of each member is the mean over its own samples, exactly as if it trained alone. The
models have no batch norm, whose statistics would count the samples that are only there to fill up.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hfusion as hf

BATCH = 64


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def padded(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Parts of different lengths as one tensor ``[B, N, ...]``, filled up with zeros, and what counts: ``[B, N]``."""
    longest = max(len(part) for part in parts)
    rows = torch.stack([F.pad(part, [0, 0] * (part.dim() - 1) + [0, longest - len(part)]) for part in parts])
    counts = torch.stack([torch.arange(longest) < len(part) for part in parts])
    return rows, counts


def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the samples that count, of one member."""
    labels, counts = target
    losses = F.cross_entropy(output, labels, reduction="none")
    return torch.where(counts, losses, 0.0).sum() / counts.sum()


def folds(samples: int, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """For each fold which samples it trains on and which it is tested with; sizes differ by one at most."""
    parts = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tensor_split(count)
    return [(torch.cat([*parts[:k], *parts[k + 1 :]]), parts[k]) for k in range(count)]


def batches(trained: Sequence[Tensor], seed: int) -> Iterator[list[Tensor]]:
    """One epoch: for each member a batch of its own samples, in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    orders = [part[torch.randperm(len(part), generator=generator)].split(BATCH) for part in trained]
    for number in range(max(map(len, orders))):
        # Who is through with its samples begins anew.
        yield [order[number % len(order)] for order in orders]


def train(x: Tensor, y: Tensor, parts: Sequence[Tensor], epochs: int, compile: bool = True) -> hf.Population:
    """A population with a member for each of ``parts``, trained on it."""
    torch.manual_seed(0)
    pop = hf.Population(
        [make_model() for _ in parts],
        optimizer=lambda params: hf.optim.Adam(params, lr=1e-3),
        loss=loss,
        tags=[f"fold {k}" for k in range(len(parts))],
        compile=compile,
    )
    for epoch in range(epochs):
        for chosen in batches(parts, epoch):
            inputs, _ = padded([x[rows] for rows in chosen])
            labels, counts = padded([y[rows] for rows in chosen])
            pop.step(hf.stacked(inputs), (hf.stacked(labels), hf.stacked(counts)))
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

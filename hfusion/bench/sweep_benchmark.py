"""The sub-benchmark ``sweep``: random search with Hyperband, HFHT's study (Wang et al., MLSys 2021), several ways.

Every contender trains the same configurations on the same data, each from the weights of its trial's seed, and calls
Optuna's Hyperband pruner after every epoch, or Ray's scheduler of the same brackets. As the decisions of pruners
depend on the values reported so far, contenders train different numbers of epochs. So the table has seconds and
epochs.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from hfusion.bench.progress import Meter

BATCH = 64
# Of a bracket of Hyperband: so many times fewer configurations get so many times more epochs.
REDUCTION = 3


class Shuffled:
    """Minibatches in an order drawn from torch's generator at every iteration; an incomplete last one is dropped."""

    def __init__(self, inputs: Tensor, target: Tensor) -> None:
        self._inputs, self._target = inputs, target

    def __len__(self) -> int:
        return len(self._target) // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self._target)).split(BATCH)[: len(self)]:
            yield self._inputs[rows], self._target[rows]


@dataclass(frozen=True, eq=False)
class SweepData:
    """Minibatches to train with, and samples to judge by."""

    train: Shuffled
    judge: tuple[Tensor, Tensor]


def digits() -> SweepData:
    """scikit-learn's handwritten digits, 3 to 1."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    order = torch.randperm(len(dataset.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(dataset.images, dtype=torch.float32)[order].unsqueeze(1) / 8 - 1
    labels = torch.tensor(dataset.target)[order]
    return SweepData(Shuffled(images[:1347], labels[:1347]), (images[1347:], labels[1347:]))


def solids() -> SweepData:
    """Clouds of 64 points on spheres, cubes, cylinders and cones, turned and scaled at random."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1344) % 4
    points = torch.stack([_solid(int(label), generator) for label in labels])
    return SweepData(Shuffled(points[:1024], labels[:1024]), (points[1024:], labels[1024:]))


def _solid(kind: int, generator: torch.Generator) -> Tensor:
    """``[3, points]``"""
    u = torch.randn(3, 64, generator=generator)
    ring, height = u[:2] / u[:2].norm(dim=0), torch.rand(1, 64, generator=generator) * 2 - 1
    shapes = (
        u / u.norm(dim=0),
        u / u.abs().amax(0),
        torch.cat([ring, height]),
        torch.cat([ring * (1 - height) / 2, height]),
    )
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator))[0]
    noise = 0.05 * torch.randn(3, 64, generator=generator)
    points: Tensor = turn @ (shapes[kind] * (0.5 + torch.rand(3, 1, generator=generator))) + noise
    return points


def cnn() -> nn.Module:
    """Return the CNN of examples/digits_sweep.py."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def pointnet() -> nn.Module:
    """Shared layers over the points, the largest of each feature, and a classifier (Qi et al., 2017), small."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([3, 32, 64, 128]):
        layers += [nn.Conv1d(inputs, outputs, 1), nn.BatchNorm1d(outputs), nn.ReLU()]
    layers += [nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4)]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class SweepCase:
    """A model and its data to search over."""

    name: str
    about: str
    make_model: Callable[[], nn.Module]
    data: Callable[[], SweepData]


CASES = (
    SweepCase("cnn", "a CNN on scikit-learn's digits", cnn, digits),
    SweepCase("pointnet", "a small PointNet on clouds of points of four solids", pointnet, solids),
)


def space(trial: Any) -> dict[str, float]:
    """Return the hyper-parameters of AdamW, the space of all contenders."""
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
    }


def accuracy(output: Tensor, target: Tensor) -> float:
    return (output.argmax(1) == target).double().mean().item()


@dataclass(frozen=True)
class SweepSettings:
    """Settings of the comparison on ``cores`` cores. ``pruned``: with Hyperband, else every trial has all epochs."""

    cases: Sequence[SweepCase]
    contenders: Sequence[SweepContender]
    trials: int
    epochs: int
    cores: int
    pruned: bool = True


@dataclass(frozen=True)
class SweepRow:
    """``speedup``: of the seconds of the contender ``one by one``; NaN where that did not run."""

    case: str
    contender: str
    trials: int
    epochs: int
    best: float
    seconds: float
    speedup: float


@dataclass(frozen=True)
class Searched:
    """The outcome of a contender: the epochs of all trials, and the best value."""

    trials: int
    epochs: int
    best: float


@dataclass(frozen=True)
class SweepContender:
    """``threaded``: torch may use all cores within an operator. ``needs``: the package, besides Optuna."""

    name: str
    about: str
    search: Callable[[SweepCase, SweepSettings], Searched]
    threaded: bool = False
    needs: str = "optuna"

    def missing(self) -> bool:
        """True if the package, or one that it needs, is not installed."""
        try:
            importlib.import_module(self.needs)
        except ImportError:
            return True
        return False


def train(case: SweepCase, data: SweepData, params: dict[str, Any], number: int, epochs: int) -> Iterator[float]:
    """One configuration alone: its accuracy after each epoch."""
    torch.manual_seed(number)
    model = case.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), **params)
    inputs, target = data.judge
    for _ in range(epochs):
        for batch, labels in data.train:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            yield accuracy(model(inputs), target)
        model.train()


def pieces(settings: SweepSettings) -> int:
    """Return the number of rows."""
    return len(settings.cases) * len(settings.contenders)


def run(settings: SweepSettings, meter: Meter) -> Iterator[SweepRow]:
    """One contender after the other, each once: they take minutes. One whose package is missing is left out."""
    for case in settings.cases:
        serial = math.nan
        for contender in settings.contenders:
            meter.say(f"{case.name}, {contender.name}")
            if contender.missing():
                meter.advance(1)
                continue
            threads = torch.get_num_threads()
            torch.set_num_threads(settings.cores if contender.threaded else 1)
            start = time.perf_counter()
            result = contender.search(case, settings)
            seconds = time.perf_counter() - start
            torch.set_num_threads(threads)
            serial = seconds if contender.name == "one-by-one" else serial
            counts = result.trials, result.epochs, result.best
            yield SweepRow(case.name, contender.name, *counts, seconds, serial / seconds)
            meter.advance(1)


def table(rows: Sequence[SweepRow]) -> Table:
    """A row for each case and contender."""
    shown = Table(title="a sweep, from the first trial to the last")
    for heading in ("case", "contender"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("trials", "epochs", "best accuracy", "seconds", "ms / epoch", "speed-up"):
        shown.add_column(heading, justify="right")
    for row in rows:
        epoch_ms = 1e3 * row.seconds / row.epochs if row.epochs else math.nan
        counts = (str(row.trials), str(row.epochs))
        speedup = "" if math.isnan(row.speedup) else f"{row.speedup:.2f}"
        shown.add_row(
            row.case, row.contender, *counts, f"{row.best:.3f}", f"{row.seconds:.1f}", f"{epoch_ms:.1f}", speedup
        )
    return shown

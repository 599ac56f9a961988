"""A search of hyper-parameters with Hyperband, in several ways (``sweep``): HFHT's study (Wang et al., MLSys 2021).

Every contender trains the same configurations on the same data, each from the weights of its trial's seed, and calls
Optuna's Hyperband pruner after every epoch. As the decisions of pruners
depend on the values reported so far, contenders train different numbers of epochs. So the table has seconds and
epochs. Needs Optuna and scikit-learn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import hfusion as hf
from hfusion.bench import harness
from hfusion.bench.cases import Contender
from hfusion.bench.harness import Benchmark, Row
from hfusion.device.native import cores

BATCH = 64
# Of a bracket of Hyperband: so many times fewer configurations get so many times more epochs.
REDUCTION = 3


# Models and data


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
    """Return scikit-learn's handwritten digits, 3 to 1."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    order = torch.randperm(len(dataset.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(dataset.images, dtype=torch.float32)[order].unsqueeze(1) / 8 - 1
    labels = torch.tensor(dataset.target)[order]
    return SweepData(Shuffled(images[:1347], labels[:1347]), (images[1347:], labels[1347:]))


def solids() -> SweepData:
    """Return clouds of 64 points on spheres, cubes, cylinders and cones, turned and scaled at random."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1344) % 4
    points = torch.stack([_solid(int(label), generator) for label in labels])
    return SweepData(Shuffled(points[:1024], labels[:1024]), (points[1024:], labels[1024:]))


def _solid(kind: int, generator: torch.Generator) -> Tensor:
    """Return a cloud ``[3, points]``."""
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
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 10))


def pointnet() -> nn.Module:
    """Return a small PointNet (Qi et al., 2017): layers over the points, the largest of each feature, a classifier."""
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


def train(case: SweepCase, data: SweepData, params: dict[str, Any], number: int, epochs: int) -> Iterator[float]:
    """Train one configuration alone, and yield its accuracy after each epoch."""
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


# Contenders


@dataclass(frozen=True)
class SweepSearch:
    """The size of a search of one case, on ``cores`` cores."""

    case: SweepCase
    trials: int
    epochs: int
    cores: int

    def configurations(self) -> list[dict[str, float]]:
        """Return the configurations, the same for all contenders."""
        import optuna

        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        return [space(study.ask()) for _ in range(self.trials)]

    def study(self, journal: str | None = None) -> Any:
        """Return a study with all configurations enqueued, kept in a file if there is one that does not exist."""
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        options: dict[str, Any] = {"direction": "maximize", "study_name": "bench", "load_if_exists": True}
        if journal is not None:
            options["storage"] = optuna.storages.JournalStorage(JournalFileBackend(journal))
        study = optuna.create_study(pruner=optuna.pruners.HyperbandPruner(1, self.epochs, REDUCTION), **options)
        for configuration in self.configurations() if not study.get_trials(deepcopy=False) else []:
            study.enqueue_trial(configuration)
        return study


class Searched(NamedTuple):
    """The outcome of a search: how many trials, the epochs of all, and the best value."""

    trials: int
    epochs: int
    best: float


def _searched(study: Any) -> Searched:
    trials = study.get_trials(deepcopy=False)
    return Searched(len(trials), sum(len(trial.intermediate_values) for trial in trials), study.best_value)


def _optimize(search: SweepSearch, study: Any, trials: int, jobs: int = 1) -> None:
    import optuna

    data = search.case.data()

    def objective(trial: Any) -> float:
        value = 0.0
        for step, value in enumerate(train(search.case, data, space(trial), trial.number, search.epochs)):
            trial.report(value, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    study.optimize(objective, n_trials=trials, n_jobs=jobs)


def optimize(search: SweepSearch, threads: bool = False) -> Searched:
    """Search by study.optimize, one trial after the other or in a thread for each core."""
    study = search.study()
    torch.set_num_threads(1 if threads else search.cores)
    _optimize(search, study, search.trials, search.cores if threads else 1)
    return _searched(study)


def _worker(search: SweepSearch, journal: str, trials: int) -> None:
    torch.set_num_threads(1)
    _optimize(search, search.study(journal), trials)


def processes(search: SweepSearch) -> Searched:
    """Search in a process for each core, with the study in a journal."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "journal"))
        study = search.study(path)
        ends = [search.trials * core // search.cores for core in range(search.cores + 1)]
        with multiprocessing.get_context("spawn").Pool(search.cores) as pool:
            pool.starmap(_worker, [(search, path, b - a) for a, b in pairwise(ends)], chunksize=1)
        return _searched(study)


def arrays(search: SweepSearch, rows: int | None = None, compile: bool | None = False) -> Searched:
    """Search by hf.sweep."""
    data, study = search.case.data(), search.study()
    inputs, target = data.judge
    hf.sweep(
        search.case.make_model,
        space,
        F.cross_entropy,
        data.train,
        eval_loader=list(zip(inputs.split(BATCH), target.split(BATCH), strict=True)),
        metric=accuracy,
        study=study,
        trials=search.trials,
        epochs=search.epochs,
        rows=rows,
        compile=compile,
    )
    return _searched(study)


CONTENDERS = (
    Contender("one-by-one", "study.optimize: one trial after the other, torch on all cores", optimize),
    Contender("threads", "study.optimize(n_jobs=cores)", partial(optimize, threads=True)),
    Contender("processes", "study.optimize in a process for each core, one journal", processes),
    Contender("hfusion", "hf.sweep", arrays),
    Contender("hfusion-wide", "hf.sweep of 64 rows", partial(arrays, rows=64)),
    Contender("hfusion-compiled", "the same, compiled where that pays", partial(arrays, rows=64, compile=None)),
)


def _run(options: argparse.Namespace) -> Iterator[Row]:
    """Run each contender once, as they take minutes. ``speedup``: of the seconds of ``one-by-one``."""
    trials, epochs = (6, 3) if options.quick else (256, 9)
    for case in options.models or CASES[: 1 if options.quick else None]:
        search, serial = SweepSearch(case, options.trials or trials, options.epochs or epochs, cores()), None
        for contender in options.contenders or CONTENDERS:
            harness.say(f"{case.name}, {contender.name}")
            row: Row = {"case": case.name, "contender": contender.name, "trials": search.trials}
            torch.set_num_threads(search.cores)
            start = time.perf_counter()
            try:
                searched: Searched = contender.start(search)
            except ModuleNotFoundError as error:
                yield row | {"reason": str(error)}
                continue
            seconds = time.perf_counter() - start
            serial = seconds if contender.name == "one-by-one" else serial
            row |= searched._asdict() | {"seconds": seconds, "speedup": serial and serial / seconds}
            if searched.trials != search.trials:
                row |= {"reason": f"{searched.trials} trials of {search.trials}", "disagrees": True}
            yield row


def _table(rows: Sequence[Row]) -> Table:
    return harness.row_table(
        "a sweep, from the first trial to the last",
        rows,
        ("case", "contender", "trials"),
        {
            "epochs": lambda row: str(row["epochs"]),
            "best accuracy": lambda row: f"{row['best']:.3f}",
            "seconds": lambda row: f"{row['seconds']:.1f}",
            "ms / epoch": lambda row: f"{1e3 * row['seconds'] / row['epochs']:.1f}",
            "speed-up": lambda row: harness.factor(row["speedup"]),
        },
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=harness.count, help="how many (default 256)")
    parser.add_argument("--epochs", type=harness.count, help="of a trial that is not pruned (default 9)")


BENCHMARK = Benchmark(__doc__, _run, _table, {"models": CASES, "contenders": CONTENDERS}, add_options=_options)

"""Does `hf.sweep` find as good models as Optuna? Best values and seconds over paired seeds, with default arguments.

Each job is searched by `study.optimize`, one trial after another in plain torch, and by `hf.sweep`, with samplers and
pruners of the same seeds. A job passes if the mean difference of the best values is not below zero by more than two of
its standard errors, and by at most the job's tolerance, and if the sweep takes no longer.

    python benchmarks/search_quality.py  # all jobs, 20 seeds: half an hour on two cores
    python benchmarks/search_quality.py --jobs digits-tpe --seeds 40 --rows 8
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import optuna
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn

import hfusion as hf

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Data:
    """Minibatches to train with, samples to evaluate on, and a value to maximize."""

    train: Batches
    held: Batches
    classes: int
    loss: Callable[..., Tensor]
    metric: Callable[..., Tensor]


def digits() -> Data:
    inputs, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    accuracy = lambda y, t: (y.argmax(-1) == t).double().mean()  # noqa: E731
    return _data((inputs / 16).float(), labels, 1216, 10, F.cross_entropy, accuracy)


def diabetes() -> Data:
    inputs, target = (torch.from_numpy(part).float() for part in load_diabetes(return_X_y=True))
    target = ((target - target.mean()) / target.std()).unsqueeze(1)
    explained = lambda y, t: 1 - F.mse_loss(y, t).double()  # noqa: E731
    return _data(inputs / inputs.std(0), target, 320, 1, F.mse_loss, explained)


def _data(inputs: Tensor, target: Tensor, count: int, classes: int, loss, metric) -> Data:
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inputs, target = inputs[order], target[order]
    train = [(inputs[i : i + 64], target[i : i + 64]) for i in range(0, count, 64)]
    return Data(train, [(inputs[count:], target[count:])], classes, loss, metric)


@dataclass(frozen=True)
class Job:
    """Data, widths of a hidden layer to choose from, a sampler by its seed, a pruner, and a tolerance of the value."""

    data: Callable[[], Data]
    widths: tuple[int, ...]
    sampler: Callable[..., optuna.samplers.BaseSampler]
    pruner: Callable[[], optuna.pruners.BasePruner] = optuna.pruners.NopPruner
    tolerance: float = 0.0015


JOBS = {
    "digits-tpe-median": Job(digits, (16, 64, 128), optuna.samplers.TPESampler, optuna.pruners.MedianPruner),
    "digits-tpe": Job(digits, (16, 64, 128), optuna.samplers.TPESampler),
    "digits-cma": Job(digits, (16, 64, 128), optuna.samplers.CmaEsSampler),
    "digits-twins-tpe": Job(digits, (64,), optuna.samplers.TPESampler),
    "diabetes-tpe-median": Job(
        diabetes, (8, 32), optuna.samplers.TPESampler, optuna.pruners.MedianPruner, tolerance=0.01
    ),
    "digits-random": Job(digits, (16, 64, 128), optuna.samplers.RandomSampler),
}


class Search:
    """A job on its data: ``trials`` trials of ``epochs`` epochs."""

    def __init__(self, job: Job, trials: int, epochs: int) -> None:
        self.job, self.data, self.trials, self.epochs = job, job.data(), trials, epochs

    def space(self, trial: optuna.Trial) -> dict[str, float]:
        return {
            "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
            "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True),
            "p": trial.suggest_float("p", 0.0, 0.7),
            "width": trial.suggest_categorical("width", self.job.widths),
        }

    def model(self, width: int, p: float) -> nn.Module:
        features = self.data.train[0][0].shape[1]
        return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Dropout(p), nn.Linear(width, self.data.classes))

    def objective(self, trial: optuna.Trial) -> float:
        """Train one trial in plain torch, as a user of Optuna would."""
        values = self.space(trial)
        torch.manual_seed(trial.number)
        model = self.model(values["width"], values["p"])
        opt = torch.optim.AdamW(model.parameters(), lr=values["lr"], weight_decay=values["weight_decay"], fused=True)
        (inputs, target), value = self.data.held[0], 0.0
        for epoch in range(self.epochs):
            model.train()
            for batch, labels in self.data.train:
                opt.zero_grad()
                self.data.loss(model(batch), labels).backward()
                opt.step()
            model.eval()
            with torch.no_grad():
                value = self.data.metric(model(inputs), target).item()
            trial.report(value, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    def alone(self, seed: int) -> float:
        study = optuna.create_study(direction="maximize", sampler=self.job.sampler(seed=seed), pruner=self.job.pruner())
        study.optimize(self.objective, n_trials=self.trials)
        return study.best_value

    def swept(self, seed: int, rows: int | None) -> float:
        result = hf.sweep(
            self.model,
            self.space,
            self.data.loss,
            self.data.train,
            trials=self.trials,
            epochs=self.epochs,
            eval_loader=self.data.held,
            metric=self.data.metric,
            direction="maximize",
            sampler=self.job.sampler(seed=seed),
            pruner=self.job.pruner(),
            rows=rows,
            seed=seed,
        )
        return result.study.best_value


def timed(search: Callable[..., float], *args: object) -> tuple[float, float]:
    """Return the best value, and seconds."""
    start = time.perf_counter()
    return search(*args), time.perf_counter() - start


def compare(name: str, seeds: int, trials: int, epochs: int, rows: int | None) -> bool:
    """Print a line for one job, and return whether it passes."""
    job = JOBS[name]
    first = Search(job, 4, 1)
    first.alone(0), first.swept(0, rows)  # imports
    search = Search(job, trials, epochs)
    alone, swept = [], []
    for seed in range(seeds):
        alone.append(timed(search.alone, seed))
        swept.append(timed(search.swept, seed, rows))
    differences = [ours[0] - theirs[0] for ours, theirs in zip(swept, alone, strict=True)]
    difference, error = statistics.mean(differences), statistics.stdev(differences) / seeds**0.5
    seconds = [statistics.median(second for _, second in runs) for runs in (alone, swept)]
    passes = difference >= -min(2 * error, job.tolerance) and seconds[1] <= seconds[0]
    best = [statistics.mean(value for value, _ in runs) for runs in (alone, swept)]
    print(
        f"{name:20s} Optuna {best[0]:.4f} in {seconds[0]:.2f} s, hf.sweep {best[1]:.4f} in {seconds[1]:.2f} s; "
        f"difference {difference:+.4f}, standard error {error:.4f}{'' if passes else '  FALLS SHORT'}",
        flush=True,
    )
    return passes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), help="of " + ", ".join(JOBS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, help="trials at a time, instead of the default")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.manual_seed(0)
    results = [
        compare(name, options.seeds, options.trials, options.epochs, options.rows) for name in options.jobs.split(",")
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

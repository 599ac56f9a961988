"""One search of benchmarks/search_spaces.py: a script that a user would write, run as a process of its own.

It is run by its path, so that the rivals do not pay for the import of hfusion: only ``hfusion`` imports it.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUTS, CLASSES, BATCH = 784, 10, 128
EVALUATION_MINIBATCHES, EVALUATION_BATCH = 4, 256

Minibatches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SearchJob:
    """The job of one process.

    Attributes:
        contender: a key of ``SEARCHES``.
        space: a key of ``UNITS``.
        trials: configurations, the same for all contenders.
        epochs: of each trial; the validation loss is reported after each.
        cores: threads of torch, or worker processes of one thread each.
        exact: float64, and a fixed factor in place of random dropout masks, so that values can be compared.
        minibatches: of an epoch.
    """

    contender: str
    space: str
    trials: int
    epochs: int
    cores: int
    exact: bool = False
    minibatches: int = 30

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.exact else torch.float32


@dataclass(frozen=True)
class SearchReport:
    """The report that the process prints as JSON.

    Attributes:
        seconds: wall time from the end of the imports to the last value.
        cpu_seconds: processor time of the same, worker processes included.
        params: of each trial, by number.
        values: of each trial, by number, after each epoch.
    """

    seconds: float
    cpu_seconds: float
    params: list[dict[str, Any]]
    values: list[list[float]]


@dataclass(frozen=True)
class SearchData:
    """Minibatches to train with, and to evaluate on."""

    train: Minibatches
    evaluation: Minibatches


class FixedFactor(nn.Module):
    """Scale by ``1 - p`` where Dropout(p) would draw a mask: a number of the model, without randomness."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 - self.p) if self.training else x


def _layers_of_own(trial: Any) -> list[int]:
    """The architecture of Optuna's PyTorch example: 1 to 3 layers, each of 4 to 128 units."""
    layers = trial.suggest_int("n_layers", 1, 3)
    return [trial.suggest_int(f"n_units_l{layer}", 4, 128) for layer in range(layers)]


def _four_widths(trial: Any) -> list[int]:
    return [trial.suggest_categorical("n_units", [32, 64, 96, 128])] * 2


def _one_width(trial: Any) -> list[int]:
    return [64, 64]


UNITS: dict[str, Callable[[Any], list[int]]] = {"unlike": _layers_of_own, "widths": _four_widths, "twins": _one_width}


def suggest(space: str, trial: Any) -> dict[str, Any]:
    """Values of one trial of ``space``: units of each hidden layer, dropout, lr."""
    return {
        "units": tuple(UNITS[space](trial)),
        "dropout": trial.suggest_float("dropout", 0.2, 0.5),
        "lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
    }


def make_model(job: SearchJob, units: Sequence[int], dropout: float) -> nn.Module:
    """An MLP with dropout after every hidden layer."""
    layers: list[nn.Module] = []
    width = INPUTS
    for count in units:
        layers += [nn.Linear(width, count), nn.ReLU(), FixedFactor(dropout) if job.exact else nn.Dropout(dropout)]
        width = count
    return nn.Sequential(*layers, nn.Linear(width, CLASSES)).to(job.dtype)


def make_data(job: SearchJob) -> SearchData:
    """Random inputs and labels: times do not depend on them."""
    generator = torch.Generator().manual_seed(0)

    def minibatches(count: int, size: int) -> Minibatches:
        return [
            (
                torch.randn(size, INPUTS, generator=generator, dtype=job.dtype),
                torch.randint(CLASSES, (size,), generator=generator),
            )
            for _ in range(count)
        ]

    return SearchData(minibatches(job.minibatches, BATCH), minibatches(EVALUATION_MINIBATCHES, EVALUATION_BATCH))


def train(job: SearchJob, data: SearchData, number: int, params: dict[str, Any]) -> Iterator[float]:
    """One trial in plain torch, from the weights of its number: its validation loss after each epoch."""
    torch.manual_seed(number)
    model = make_model(job, params["units"], params["dropout"])
    optimizer = torch.optim.Adam(model.parameters(), lr=params["lr"], fused=True)
    for _ in range(job.epochs):
        model.train()
        for inputs, target in data.train:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(inputs), target).item() for inputs, target in data.evaluation]
        yield sum(losses) / len(losses)


def make_study(job: SearchJob) -> Any:
    """A study without pruning, where the same configurations wait for every contender."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    drawn = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study = optuna.create_study(direction="minimize", pruner=optuna.pruners.NopPruner())
    for _ in range(job.trials):
        trial = drawn.ask()
        suggest(job.space, trial)
        study.enqueue_trial(trial.params)
    return study


def search_loop(job: SearchJob, study: Any) -> None:
    """study.optimize: one trial after another, torch on all cores."""
    torch.set_num_threads(job.cores)
    data = make_data(job)

    def objective(trial: Any) -> float:
        value = float("nan")
        for epoch, value in enumerate(train(job, data, trial.number, suggest(job.space, trial))):
            trial.report(value, epoch)
        return value

    study.optimize(objective, n_trials=job.trials)


class _SearchWorker:
    """A process that trains trials of one job; its data are made once."""

    job: SearchJob
    data: SearchData

    @classmethod
    def start(cls, job: SearchJob) -> None:
        torch.set_num_threads(1)
        cls.job, cls.data = job, make_data(job)

    @classmethod
    def train(cls, trial: tuple[int, dict[str, Any]]) -> tuple[int, list[float]]:
        number, params = trial
        return number, list(train(cls.job, cls.data, number, params))


def search_processes(job: SearchJob, study: Any) -> None:
    """A process for each core; a free one takes the next trial."""
    # A forked worker has the imports already; nothing has started threads of torch in this process.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    trials = [study.ask() for _ in range(job.trials)]
    queue = [(trial.number, suggest(job.space, trial)) for trial in trials]
    pool = multiprocessing.get_context(method).Pool(min(job.cores, job.trials), _SearchWorker.start, (job,))
    with pool:
        for number, values in pool.imap_unordered(_SearchWorker.train, queue):
            for epoch, value in enumerate(values):
                trials[number].report(value, epoch)
            study.tell(trials[number], values[-1])
        pool.close()
        # Workers that have not ended are not counted in the processor time.
        pool.join()


def search_arrays(job: SearchJob, study: Any) -> None:
    """hf.sweep with its default arguments."""
    import hfusion as hf

    torch.set_num_threads(job.cores)
    data = make_data(job)
    hf.sweep(
        lambda units, dropout: make_model(job, units, dropout),
        lambda trial: suggest(job.space, trial),
        F.cross_entropy,
        data.train,
        trials=job.trials,
        epochs=job.epochs,
        optimizer=hf.optim.Adam,
        eval_loader=data.evaluation,
        metric=F.cross_entropy,
        study=study,
    )


SEARCHES: dict[str, Callable[[SearchJob, Any], None]] = {
    "loop": search_loop,
    "processes": search_processes,
    "hfusion": search_arrays,
}


def run(job: SearchJob) -> SearchReport:
    """Search, and report each trial. Raises RuntimeError if a trial is not complete."""
    # Imports are part of the command, and counted by whoever started it.
    importlib.import_module("hfusion" if job.contender == "hfusion" else "optuna")
    started, cpu_started = time.perf_counter(), _cpu_seconds()
    study = make_study(job)
    SEARCHES[job.contender](job, study)
    seconds, cpu_seconds = time.perf_counter() - started, _cpu_seconds() - cpu_started
    trials = study.get_trials(deepcopy=False)
    incomplete = [trial.number for trial in trials if trial.state.name != "COMPLETE"]
    if incomplete or len(trials) != job.trials:
        raise RuntimeError(f"{len(trials)} trials of {job.trials}, of which {incomplete} are not complete")
    return SearchReport(
        seconds,
        cpu_seconds,
        [trial.params for trial in trials],
        [[trial.intermediate_values[epoch] for epoch in range(job.epochs)] for trial in trials],
    )


def _cpu_seconds() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    import resource

    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    print(json.dumps(asdict(run(SearchJob(**json.loads(sys.argv[1]))))))

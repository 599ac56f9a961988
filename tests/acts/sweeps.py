"""Acts on `hf.sweep`, which trains trials from start to end: values are those of trials alone in torch."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import optuna
import torch
from torch import Tensor

import hfusion as hf
from tests.acts.acts import CutError
from tests.acts.clients import OPTIMIZERS, SCHEDULES, Setup
from tests.acts.zoo import ZOO, Entry, loss
from tests.alone import Member, Own, close
from tests.trained import machine

EPOCHS, BATCHES, TRIALS, SEED = 3, 3, 5, 11
ACTS = ("prune", "interrupt", "few rows", "unlike", "processes", "every step", "asynchronous", "own epochs", "metric")


class Loader:
    """Minibatches that are drawn anew for each epoch, all of them when it begins."""

    def __init__(self, entry: Entry, count: int = BATCHES) -> None:
        self.entry, self.count = entry, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(self.entry.draw(4), torch.randn(4, dtype=torch.float64)) for _ in range(self.count)])


class PruneOne(optuna.pruners.BasePruner):
    """Prunes trial 1 after its first epoch."""

    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.number == 1)


@dataclass
class Metric:
    """The loss of two parts of the samples, added up; raises at a call, if it is to."""

    left: int | None = None

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise CutError
        return loss(output, target) * 2


def scheduler(optimizer: Any, schedule: int) -> Any:
    return SCHEDULES[schedule](optimizer)


@dataclass(frozen=True)
class Sweep:
    """A sweep with some acts: see ``ACTS``."""

    setup: Setup
    acts: tuple[str, ...]
    seed: int = 0

    def __str__(self) -> str:
        return f"sweep: {self.setup}; {', '.join(self.acts)} (seed {self.seed})"

    def values(self, trial: Any) -> dict[str, Any]:
        """Return what a trial is trained with, besides the rate that it suggests."""
        draw = random.Random(f"{self.seed} {trial.number}")
        values = dict(OPTIMIZERS[self.setup.optimizer][1])
        values |= {"kind": trial.number, "depth": trial.number % 3 if "unlike" in self.acts else 0}
        values["clip_norm"] = draw.choice([0.1, 1.0]) if self.setup.clips_norm else None
        values["accumulate"] = self.setup.accumulate[0]
        values["epochs"] = 1 + trial.number % EPOCHS if "own epochs" in self.acts else EPOCHS
        if self.setup.scheduled:
            values["schedule"] = draw.randrange(len(SCHEDULES))
        return values

    def space(self, trial: Any) -> dict[str, Any]:
        return {"lr": trial.suggest_float("lr", 1e-3, 0.03, log=True), **self.values(trial)}

    def judges(self) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(5)
        return list(Loader(self.setup.entry, 2))

    def search(self, folder: str | None, metric: Metric | None) -> hf.SweepResult:
        return hf.sweep(
            self.setup.entry.model,
            self.space,
            loss,
            Loader(self.setup.entry),
            trials=TRIALS,
            epochs=EPOCHS,
            optimizer=getattr(hf.optim, OPTIMIZERS[self.setup.optimizer][0]),
            scheduler=scheduler if self.setup.scheduled else None,
            scheduler_interval="step" if "every step" in self.acts else "epoch",
            eval_loader=self.judges(),
            metric=metric,
            sampler=optuna.samplers.RandomSampler(seed=self.seed),
            pruner=PruneOne() if "prune" in self.acts else optuna.pruners.NopPruner(),
            machine=machine(),
            directory=folder,
            rows=2 if "few rows" in self.acts else None,
            seed=SEED,
            compile=False,
            processes=2 if "processes" in self.acts else 0,
            rounds="asynchronous" if "asynchronous" in self.acts else "together",
        )

    def alone(self, trial: Any, epochs: int) -> list[float]:
        """Return the values of a trial that plain torch trains."""
        given, found = self.values(trial), []
        torch.manual_seed(trial.number)
        model = self.setup.entry.model(given["kind"], given["depth"])
        schedule = SCHEDULES[given["schedule"]] if self.setup.scheduled else None
        own = Own(trial.params["lr"], schedule, given["accumulate"])
        if given["clip_norm"] is not None:
            own.norm = given["clip_norm"]
        member = Member(model, self.setup.maker(0.1, alone=True), loss, own)
        for epoch in range(epochs):
            torch.manual_seed(SEED + trial.user_attrs["hfusion:round"] + epoch)
            member.epoch(Loader(self.setup.entry), schedules_steps="every step" in self.acts)
            found.append(member.judged(self.judges()) * (2 if self.with_metric else 1))
            if "every step" not in self.acts:
                member.step_schedule(found[-1])
        return found

    @property
    def with_metric(self) -> bool:
        return bool({"metric", "interrupt"} & set(self.acts))

    def run(self) -> None:
        """Search, and compare each value that was reported."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        metric = Metric() if self.with_metric else None
        with tempfile.TemporaryDirectory() as folder:
            if "interrupt" in self.acts:
                try:
                    self.search(folder, Metric(4))
                except CutError:
                    pass
                else:
                    raise AssertionError("the sweep was not interrupted")
            trials = self.search(folder if "interrupt" in self.acts else None, metric).trials
        assert [trial.number for trial in trials] == list(range(TRIALS))
        for trial in trials:
            pruned = trial.number == 1 and "prune" in self.acts
            assert trial.state.name == ("PRUNED" if pruned else "COMPLETE")
            expected = self.alone(trial, 1 if pruned else self.values(trial)["epochs"])
            reported = trial.intermediate_values
            assert sorted(reported) == list(range(len(expected)))
            values = torch.tensor([reported[step] for step in sorted(reported)], dtype=torch.float64)
            close(values, [torch.tensor(expected, dtype=torch.float64)], f"values of trial {trial.number}")


def sweep_of(entry: str, acts: tuple[str, ...], draw: random.Random, seed: int) -> Sweep:
    """Draw how the trials of a sweep are trained."""
    optimizer = draw.choice(list(OPTIMIZERS))
    setup = Setup(
        ZOO[entry], optimizer, draw.random() < 0.6, clips_norm=draw.random() < 0.5, accumulate=draw.choice([(1,), (2,)])
    )
    return Sweep(setup, acts, seed)

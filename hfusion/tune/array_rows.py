"""The trials of an array in the process that trains them: joining, training an epoch, leaving."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.optim.lr_scheduler import Make
from hfusion.population.evaluation import evaluate
from hfusion.population.group_step import flush, limit_norms
from hfusion.population.population import Population
from hfusion.tune.space import ArrayChoices, MakeOptimizer, Suggestion, SweepTrial, optimizer_with
from hfusion.tune.sweep_folder import KEEP
from hfusion.tune.trial_rows import SweepRecipe, TrialRows


class ArrayRows(TrialRows):
    """Trials of one shape as members of a population."""

    def __init__(self, recipe: SweepRecipe, choices: ArrayChoices, stopping: Callable[[], bool]) -> None:
        super().__init__(recipe, choices, stopping)
        # No processes here: the sweep already distributes its arrays over processes.
        self._options: dict[str, Any] = {
            "processes": 0,
            "loss": self._loss,
            "compile": recipe.compile,
            "accumulate": choices.accumulate,
        }
        self._population: Population | None = None

    @property
    def population(self) -> Population:
        assert self._population is not None, "a trial joins first"
        return self._population

    def _optimizer(self, members: Sequence[SweepTrial]) -> MakeOptimizer:
        hypers = [member.suggestion.hypers for member in members]
        return optimizer_with(self._choices.optimizer, self._choices.options, hypers)

    def _schedules(self, members: Sequence[SweepTrial]) -> list[Make] | None:
        """Return a function for each member that makes its scheduler; None without schedulers."""
        make = self._recipe.scheduler
        return None if make is None else [partial(make, **member.suggestion.scheduler) for member in members]

    def join(self, new: Sequence[SweepTrial]) -> None:
        """Give a row to each new trial."""
        models, tags, schedules = [member.model for member in new], [member.tag for member in new], self._schedules(new)
        limits: dict[str, Any] = {}
        if self._choices.clips:
            limits["clip_norm"] = [member.suggestion.clip_norm for member in new]
        if self._population is None:
            self._population = Population(
                models, optimizer=self._optimizer(new), tags=tags, scheduler=schedules, **limits, **self._options
            )
        else:
            rows = self._population.append(models, tag=tags, scheduler=schedules, **limits)
            for member in new:
                self._write(member.tag, member.suggestion.hypers)
            if schedules is not None and self._population.scheduler is not None:
                # Schedules begin from the rates that were just written.
                self._population.scheduler.restart(rows, schedules)
        if self._population.scheduler is not None:
            self._check_schedules(self._population.scheduler.kinds)

    def _write(self, tag: str, hypers: dict[str, Any]) -> None:
        """Write hyper-parameters of a member."""
        row, hparams = self.population.row(tag), self.population.hparams
        for key, value in hypers.items():
            vectors = hparams[key]
            pairs = zip(vectors, value, strict=True) if isinstance(vectors, tuple) else [(vectors, value)]
            for vector, number in pairs:
                vector[row] = torch.as_tensor(number, dtype=torch.float64, device="cpu")

    def exploit(self, pairs: Sequence[tuple[str, str]], suggestions: Sequence[Suggestion]) -> None:
        """Copy members by pairs of tags ``(source, target)``; targets get the hyper-parameters of ``suggestions``."""
        rows = [[self.population.row(pair[position]) for pair in pairs] for position in range(2)]
        self.population.copy(*rows)
        for (_, tag), suggestion in zip(pairs, suggestions, strict=True):
            self._write(tag, suggestion.hypers)
            if suggestion.clip_norm is not None:
                limit_norms(self.population, [self.population.row(tag)], suggestion.clip_norm)

    def leave(self, tag: str) -> nn.Module:
        """Free the row of a member, and return its model on the CPU."""
        model: nn.Module = self.population.stop(self.population.row(tag))
        return model.cpu()

    def discard(self, tag: str) -> None:
        """Free the row of a member, and drop its model."""
        self.population.stop(self.population.row(tag))

    def epoch(self, seed: int, evaluates: bool = True) -> dict[str, tuple[float, ...]]:
        # Trials have joined by now, so rows that are still free are not needed.
        self.population.compact()
        return super().epoch(seed, evaluates)

    def save(self, folder: Path) -> Path:
        """Save all trials, and return the path of the save."""
        self.population.compact()
        path: Path = self.population.save(folder, keep=KEEP).result()
        return path

    def restore(self, saved: Path, members: Sequence[SweepTrial]) -> None:
        """Restore trials from a save."""
        by_tag = {member.tag: member for member in members}
        schedules = self._schedules(members)
        # The first member's values are placeholders that go with the options. Loading overwrites them.
        self._population = Population.load(
            saved,
            lambda tag: by_tag[tag].model,
            random=False,
            optimizer=self._optimizer(members[:1]),
            scheduler=None if schedules is None else dict(zip(by_tag, schedules, strict=True)),
            clip_norm=members[0].suggestion.clip_norm,
            **self._options,
        )

    def _members(self) -> dict[int, str]:
        return {row: tag for row, tag in enumerate(self.population.tags) if tag is not None}

    def _step(self, inputs: Any, target: Any) -> tuple[Tensor, bool]:
        updates = self.population.steps
        losses = self.population.step(inputs, target)
        return losses, self.population.steps > updates

    def _flush(self) -> bool:
        return flush(self.population)

    def _diverged(self, trained: Tensor) -> Collection[int]:
        self.population.clear_gradients()
        return set(self.population.frozen)

    def _schedule(self, values: Tensor) -> None:
        if self.population.scheduler is not None:
            self.population.scheduler.step(metrics=values, rows=list(self._members()))

    def _measured(self, metric: Callable[..., Any], batches: Iterable[Any]) -> dict[int, tuple[float, ...]]:
        return evaluate(self.population, metric, batches, self._convert)

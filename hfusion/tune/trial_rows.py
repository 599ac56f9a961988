"""The rows of an array of trials, in the process that trains them: joining, training an epoch, leaving."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.core.row_indices import Widths
from hfusion.optim.convert import fuse
from hfusion.optim.lr_scheduler import Make
from hfusion.population.group_step import flush, limit_norms
from hfusion.population.population import Population
from hfusion.tune.chosen_optimizer import MakeOptimizer, optimizer_with
from hfusion.tune.loaders import batches_on, seeded
from hfusion.tune.objectives import MetricValues, check_plateaus
from hfusion.tune.plain_trials import PlainTrial
from hfusion.tune.space import ArrayChoices, Suggestion, TrialModel
from hfusion.tune.sweep_folder import KEEP
from hfusion.tune.training_setup import EpochResult, SweepRecipe


class TrialRows:
    """Trials of one shape as a population. ``stopping``: returns whether to end an epoch immediately."""

    def __init__(self, recipe: SweepRecipe, choices: ArrayChoices, stopping: Callable[[], bool]) -> None:
        self._recipe, self._stopping, self._choices = recipe, stopping, choices
        self._loader = recipe.loaders.loader(choices.loader)
        self._loss = recipe.loss_of(choices)
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

    def _optimizer(self, hypers: Sequence[Mapping[str, Any]]) -> MakeOptimizer:
        return optimizer_with(self._choices.optimizer, self._choices.options, hypers)

    def _limits(self, members: Sequence[TrialModel]) -> dict[str, Any]:
        """Return the maximum gradient norms of new members as a keyword argument; empty if the array does not clip."""
        norms = [member.suggestion.clip_norm for member in members]
        return {"clip_norm": norms} if self._choices.clips else {}

    def _schedules(self, members: Sequence[TrialModel]) -> list[Make] | None:
        """Return a function for each member that makes its scheduler; None without schedulers."""
        make = self._recipe.scheduler
        return None if make is None else [partial(make, **member.suggestion.scheduler) for member in members]

    def join(self, new: Sequence[TrialModel]) -> None:
        """Give a row to each new trial."""
        models, tags = [member.model for member in new], [member.tag for member in new]
        schedules, limits = self._schedules(new), self._limits(new)
        if self._population is None:
            optimizer = self._optimizer([member.suggestion.hypers for member in new])
            self._population = Population(
                models, optimizer=optimizer, tags=tags, scheduler=schedules, **limits, **self._options
            )
            self._check_schedules()
            return
        pop = self.population
        missing = len(new) - pop.tags.count(None)
        if missing > 0:
            pop.grow(missing)
        rows = [row for row, tag in enumerate(pop.tags) if tag is None][: len(new)]
        pop.start(rows, models, tag=tags, scheduler=schedules, **limits)
        for member in new:
            self._write(member.tag, member.suggestion.hypers)
        if schedules is not None and pop.scheduler is not None:
            # Schedules begin from the rates that were just written.
            pop.scheduler.restart(rows, schedules)
            self._check_schedules()

    def adopt(self, states: Mapping[str, dict[str, Any]], members: Sequence[TrialModel]) -> None:
        """Continue plain trials as rows of a new array. ``states``: by tag, those of `PlainTrials`."""
        trials = [PlainTrial(member, self._recipe, self._choices) for member in members]
        for member, trial in zip(members, trials, strict=True):
            trial.load(states[member.tag])
        self.join(members)
        pop = self.population.array
        pop.optimizer.load_state_dict(fuse([trial.optimizer for trial in trials], pop.fused).state_dict())
        for row, trial in enumerate(trials):
            if pop.scheduler is not None and trial.scheduler is not None:
                pairs = zip(pop.scheduler.member_state(row)["groups"], trial.optimizer.param_groups, strict=True)
                # Schedulers store values in param groups, such as the initial rate.
                groups = [{key: group.get(key, value) for key, value in fresh.items()} for fresh, group in pairs]
                state = {"scheduler": trial.scheduler.state_dict(), "groups": groups}
                pop.scheduler.load_member(row, state)

    def _check_schedules(self) -> None:
        """Raise ValueError for a scheduler that watches one value, if there are several objectives."""
        if self.population.scheduler is not None and not self._recipe.every_step:
            check_plateaus(self._recipe.objectives, self.population.scheduler.kinds)

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

    def epoch(self, seed: int, evaluates: bool = True) -> EpochResult:
        """Train all members for an epoch under a seed, and evaluate them. Values of members that diverged are NaN.

        evaluates: False if no values are needed after this epoch.
        """
        pop, recipe = self.population, self._recipe
        began, losses = time.perf_counter(), []
        with seeded(self._loader, seed):
            for inputs, target in batches_on("loader", self._loader, recipe.device):
                if self._stopping():
                    raise KeyboardInterrupt
                updates = pop.steps
                losses.append(pop.step(inputs, target))
                if recipe.every_step and pop.steps > updates:
                    self._schedule(losses[-1])
            # The last update of an epoch may be of fewer minibatches.
            if flush(pop) and recipe.every_step:
                self._schedule(losses[-1])
        trained = torch.stack(losses).double().mean(0)
        # Nobody needs gradients until the next step; another array may use their memory.
        pop.clear_gradients()
        bad = set(pop.frozen)
        values: Sequence[tuple[float, ...]] = [(value,) for value in trained.tolist()]
        if not evaluates:
            values = [()] * len(pop)
        elif recipe.evaluates:
            role, loader = recipe.judged(self._choices)
            with seeded(loader, seed):
                values = self._evaluated(batches_on(role, loader, recipe.device))
        if not recipe.every_step:
            self._schedule(
                None if recipe.objectives > 1 else torch.tensor(values, dtype=torch.float64, device="cpu").squeeze(1)
            )
        failed = (math.nan,) * recipe.objectives
        named = {tag: failed if row in bad else values[row] for row, tag in enumerate(pop.tags) if tag is not None}
        return EpochResult(named, time.perf_counter() - began, len(losses))

    def _evaluated(self, batches: Iterable[Any]) -> list[tuple[float, ...]]:
        """Return the values of each row; NaN for free rows."""
        metric, count = self._recipe.metric or self._loss, self._recipe.objectives
        if count == 1:
            return [(value,) for value in self.population.evaluate(metric, batches).tolist()]
        values = MetricValues(metric, count)
        indices = self.population.evaluate(values.metric, batches).tolist()
        free = (math.nan,) * count
        return [free if math.isnan(index) else values.noted[int(index)] for index in indices]

    def _schedule(self, values: Tensor | None) -> None:
        """Step the members' schedulers. ``values [B]`` are for ReduceLROnPlateau."""
        if self.population.scheduler is not None:
            rows = [row for row, tag in enumerate(self.population.tags) if tag is not None]
            self.population.scheduler.step(metrics=values, rows=rows)

    def leave(self, tag: str) -> nn.Module:
        """Free the row of a member, and return its model on the CPU."""
        model: nn.Module = self.population.stop(self.population.row(tag))
        return model.cpu()

    def discard(self, tag: str) -> None:
        """Free the row of a member, and drop its model."""
        self.population.stop(self.population.row(tag))

    def compact(self) -> None:
        """Release the memory of free rows."""
        self.population.compact()

    def collect(self) -> None:
        """Collect garbage: members that left, arrays and programs form reference cycles."""
        gc.collect()

    def save(self, folder: Path) -> Path:
        """Save all rows, and return the path of the save."""
        path: Path = self.population.save(folder, keep=KEEP).result()
        return path

    def restore(self, saved: Path, members: Sequence[TrialModel]) -> tuple[Widths, int]:
        """Restore the array of ``members`` from a save. Return its widths and number of rows."""
        by_tag = {member.tag: member for member in members}
        schedules = self._schedules(members)
        # The first member's values are placeholders that go with the options. Loading overwrites them.
        self._population = Population.load(
            saved,
            lambda tag: by_tag[tag].model,
            random=False,
            optimizer=self._optimizer([members[0].suggestion.hypers]),
            scheduler=None if schedules is None else dict(zip(by_tag, schedules, strict=True)),
            clip_norm=members[0].suggestion.clip_norm,
            **self._options,
        )
        return self.population.widths, len(self.population)

"""The rows of an array of trials, in the process that trains them: who joins, an epoch of all, who leaves."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.checkpoint.packed import PackedSave
from hfusion.core.errors import PlanError
from hfusion.device.generators import draws_kept
from hfusion.optim import FusedOptimizer
from hfusion.population.population import Population
from hfusion.population.saving import packed
from hfusion.population.widths import Widths
from hfusion.tasks.reading import generators, reading, restart_workers
from hfusion.tasks.task import length
from hfusion.tune.epoch_result import EpochResult, Stopwatch
from hfusion.tune.folder import KEEP
from hfusion.tune.space import MakeOptimizer, TrialModel


@dataclass(frozen=True, eq=False)
class SweepRecipe:
    """What the arrays of a sweep have in common."""

    optimizer: MakeOptimizer
    loss: Callable[..., Any]
    loader: Iterable[Any]
    eval_loader: Iterable[Any] | None
    metric: Callable[..., Any] | None
    device: torch.device
    compile: bool | str
    clip: float | None

    @property
    def evaluates(self) -> bool:
        """Whether there is more to a value than the losses of the steps."""
        return self.metric is not None or self.eval_loader is not None

    @property
    def judged(self) -> tuple[str, Iterable[Any]]:
        """What values are of, by its name."""
        return ("loader", self.loader) if self.eval_loader is None else ("eval_loader", self.eval_loader)

    def optimizer_with(self, options: dict[str, Any], hypers: Sequence[Mapping[str, Any]] = ()) -> MakeOptimizer:
        """Return a function that makes the optimizer with the options of a trial, which hold for a whole array.

        hypers: of each member, or of one for all; options may need some, as nesterov needs momentum. What a member does
        not give is as the optimizer has it.
        """

        def made(params: Any) -> FusedOptimizer:
            optimizer = self.optimizer(params)
            if isinstance(optimizer, FusedOptimizer):
                keys = dict.fromkeys(key for member in hypers for key in member)
                for group in optimizer.param_groups:
                    group.update(options)
                    group.update({key: _values(group[key], [member.get(key) for member in hypers]) for key in keys})
            return optimizer

        return made


def _values(defaults: Any, given: Sequence[Any]) -> Any:
    """A hyper-parameter of each member, or of all; a pair where it is one. None: the default."""
    if isinstance(defaults, tuple):
        columns = [[None if value is None else value[place] for value in given] for place in range(len(defaults))]
        return tuple(_values(default, column) for default, column in zip(defaults, columns, strict=True))
    if len(given) == 1:
        return defaults if given[0] is None else given[0]
    return [default if value is None else float(value) for default, value in zip(defaults.tolist(), given, strict=True)]


class TrialRows:
    """Members whose models have one shape, as a population. ``stopping``: whether an epoch is to end at once."""

    def __init__(self, recipe: SweepRecipe, options: dict[str, Any], stopping: Callable[[], bool]) -> None:
        self._recipe, self._stopping, self._options = recipe, stopping, options
        optimizer = recipe.optimizer_with(options)
        self._given: dict[str, Any] = {
            "optimizer": optimizer,
            "loss": recipe.loss,
            "compile": recipe.compile,
            "clip_norm": recipe.clip,
        }
        self._population: Population | None = None

    @property
    def population(self) -> Population:
        assert self._population is not None, "somebody joins first"
        return self._population

    def join(self, new: Sequence[TrialModel]) -> None:
        """Give each a row."""
        models, tags = [one.model for one in new], [one.tag for one in new]
        if self._population is None:
            optimizer = self._recipe.optimizer_with(self._options, [one.suggestion.hypers for one in new])
            self._population = Population(models, tags=tags, **{**self._given, "optimizer": optimizer})
        else:
            missing = len(new) - self.population.tags.count(None)
            if missing > 0:
                self.population.grow(missing)
            free = [row for row, tag in enumerate(self.population.tags) if tag is None]
            self.population.start(free[: len(new)], models, tag=tags)
        for one in new:
            self._write(one.tag, one.suggestion.hypers)

    def _write(self, tag: str, hypers: dict[str, Any]) -> None:
        """Give a member hyper-parameters."""
        row, hparams = self.population.row(tag), self.population.hparams
        for key, value in hypers.items():
            vectors = hparams[key]
            pairs = zip(vectors, value, strict=True) if isinstance(vectors, tuple) else [(vectors, value)]
            for vector, own in pairs:
                vector[row] = torch.as_tensor(own, dtype=torch.float64)

    def exploit(self, pairs: Sequence[tuple[str, str]], hypers: Sequence[dict[str, Any]]) -> None:
        """Let each second become a copy of the first, with hyper-parameters of its own."""
        rows = [[self.population.row(pair[place]) for pair in pairs] for place in range(2)]
        self.population.copy(*rows)
        for (_, tag), own in zip(pairs, hypers, strict=True):
            self._write(tag, own)

    def epoch(self, seed: int) -> EpochResult:
        """Train all members for an epoch under a seed, and evaluate them: a value for each tag; NaN if it went bad."""
        pop, recipe = self.population, self._recipe
        began, steps, judgements = time.perf_counter(), Stopwatch(), Stopwatch()
        losses = []
        with _seeded(recipe.loader, seed):
            for inputs, target in steps.timed(_batches("loader", recipe.loader, recipe.device)):
                if self._stopping():
                    raise KeyboardInterrupt
                losses.append(pop.step(inputs, target))
        trained = torch.stack(losses).double().mean(0)
        # Nobody needs gradients until the next step; another array may use their memory.
        pop.fused.zero_grad()
        bad = set(pop.frozen)
        found = trained
        if recipe.evaluates:
            role, loader = recipe.judged
            with _seeded(loader, seed):
                batches = judgements.timed(_batches(role, loader, recipe.device))
                found = pop.evaluate(recipe.metric or recipe.loss, batches)
        values = found.tolist()
        named = {tag: math.nan if row in bad else values[row] for row, tag in enumerate(pop.tags) if tag is not None}
        startup = steps.startup + judgements.startup
        return EpochResult(named, time.perf_counter() - began - startup, startup, len(losses))

    def leave(self, tag: str) -> nn.Module:
        """The member's model, on the CPU; its row is free."""
        model: nn.Module = self.population.stop(self.population.row(tag))
        return model.cpu()

    def compact(self) -> None:
        """Give back what free rows take."""
        self.population.compact()

    def collect(self) -> None:
        """Look for what members that left, arrays and programs hold by holding one another."""
        gc.collect()

    def save(self, folder: Path) -> Path:
        """Save all; where."""
        path: Path = self.population.save(folder, keep=KEEP).result()
        return path

    def packed(self) -> PackedSave:
        """All that a save holds."""
        return packed(self.population)

    def restore(self, saved: Path | PackedSave, members: Sequence[TrialModel]) -> tuple[Widths, int]:
        """Be what was saved or packed of these; its widths, and its rows."""
        known = {one.tag: one for one in members}
        found = saved.saved() if isinstance(saved, PackedSave) else saved
        # Values that go with the options; those of the members are then written over them.
        optimizer = self._recipe.optimizer_with(self._options, [members[0].suggestion.hypers])
        self._population = Population.load(
            found, lambda tag: known[tag].model, random=False, **{**self._given, "optimizer": optimizer}
        )
        return self.population._widths, len(self.population)


@contextmanager
def _seeded(loader: Iterable[Any], seed: int) -> Iterator[None]:
    """Inside, torch and the loader draw as after ``manual_seed(seed)``; afterwards all generators are as before."""
    restart_workers(loader)
    own = [(each, each.get_state()) for each in generators(loader)]
    with draws_kept():
        torch.manual_seed(seed)
        for each, _ in own:
            each.manual_seed(seed)
        try:
            yield
        finally:
            for each, state in own:
                each.set_state(state)


def _batches(role: str, loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Its minibatches on the device. Raises PlanError for what is no pair, and where there is none."""
    count = 0
    with reading(loader) as found:
        for count, batch in enumerate(found, 1):  # noqa: B007
            if not isinstance(batch, list | tuple) or len(batch) != 2:
                raise PlanError(
                    f"a minibatch of the {role} is a {type(batch).__name__}: it must be a pair (inputs, target), "
                    "inputs a tensor, a tuple of arguments or a dict of keyword arguments"
                )
            yield _on(batch[0], device), _on(batch[1], device)
    if not count:
        raise PlanError(f"the {role} gave no minibatch: give one that can be read again for every epoch")


def _on(value: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def minibatches(loader: Iterable[Any]) -> int:
    """How many it gives, read for that where it has no length; its generators are then as before."""
    try:
        return length(loader)
    except TypeError:
        with _seeded(loader, 0), reading(loader) as found:
            return sum(1 for _ in found)


def first_inputs(loader: Iterable[Any], device: torch.device) -> Any:
    """The inputs of its first minibatch; the loader's generators are then as before. Raises PlanError."""
    with _seeded(loader, 0):
        for inputs, _ in _batches("loader", loader, device):
            return inputs
    raise AssertionError("unreachable: a loader without minibatches is an error")

"""The trials of one shape as a population: who joins, an epoch of all, who leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.compare import check_pair
from hfusion.core.errors import FusionError, PlanError
from hfusion.device.backend import random_states_kept
from hfusion.optim import FusedOptimizer
from hfusion.population.population import Population
from hfusion.tasks.reading import generators, reading
from hfusion.tune.footprint import Footprint
from hfusion.tune.space import MakeOptimizer, Suggestion, TrialModel


@dataclass
class Seat:
    """A trial in an array: ``began`` in which round of the sweep, ``epochs`` that it has trained.

    ``params``: what it has instead of its suggestions, once it became a copy of another.
    """

    number: int
    suggestion: Suggestion
    began: int
    epochs: int = 0
    params: dict[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class SweepRecipe:
    """What the arrays of a sweep have in common."""

    optimizer: MakeOptimizer
    loss: Callable[..., Any]
    loader: Iterable[Any]
    eval_loader: Iterable[Any] | None
    metric: Callable[..., Any] | None
    device: torch.device
    compile: bool

    @property
    def evaluates(self) -> bool:
        """Whether there is more to a value than the losses of the steps."""
        return self.metric is not None or self.eval_loader is not None

    @property
    def judged(self) -> tuple[str, Iterable[Any]]:
        """What values are of, by its name."""
        return ("loader", self.loader) if self.eval_loader is None else ("eval_loader", self.eval_loader)

    def optimizer_with(self, options: dict[str, Any]) -> MakeOptimizer:
        """It with the options that a trial chose, which hold for an array as a whole."""

        def made(params: Any) -> FusedOptimizer:
            optimizer = self.optimizer(params)
            if isinstance(optimizer, FusedOptimizer):
                for group in optimizer.param_groups:
                    group.update(options)
            return optimizer

        return made


class ShapeArray:
    """An array whose members are trials with models of one shape and the same options of the optimizer.

    ``joining`` are those that get rows when `join` is called.
    """

    def __init__(self, name: str, first: TrialModel, footprint: Footprint, recipe: SweepRecipe) -> None:
        self.name, self.footprint = name, footprint
        self._first, self._recipe = first, recipe
        self.population: Population | None = None
        self.seats: dict[str, Seat] = {}
        self.joining: list[TrialModel] = []
        self._fastest: int | None = None

    def takes(self, candidate: TrialModel) -> bool:
        """Whether the trial can be a member."""
        if candidate.suggestion.options != self._first.suggestion.options:
            return False
        try:
            check_pair(self._first.model, 0, candidate.model)
        except FusionError:
            return False
        return True

    @property
    def taken(self) -> int:
        """Rows that are taken, or will be."""
        return len(self.seats) + len(self.joining)

    def rows(self, more: int = 0) -> int:
        """How many rows there are, with so many more members."""
        members = self.taken + more
        if self.population is None:
            return members
        there = len(self.population)
        return there if members <= there else self.population._widths.of(members)

    def join(self, round_: int) -> list[int]:
        """Give rows to those that wait; the numbers of their trials."""
        new, self.joining = self.joining, []
        if not new:
            return []
        models, tags = [one.model for one in new], [one.tag for one in new]
        if self.population is None:
            self.population = Population(models, tags=tags, **self.options)
        else:
            missing = len(new) - self.population.tags.count(None)
            if missing > 0:
                self.population.grow(missing)
            free = [row for row, tag in enumerate(self.population.tags) if tag is None]
            self.population.start(free[: len(new)], models, tag=tags)
        self.seats |= {one.tag: Seat(one.number, one.suggestion, round_) for one in new}
        for one in new:
            self._write(one.tag, one.suggestion.hypers)
        return [one.number for one in new]

    def _write(self, tag: str, hypers: dict[str, Any]) -> None:
        """Give a member hyper-parameters."""
        assert self.population is not None
        row, hparams = self.population.row(tag), self.population.hparams
        for key, value in hypers.items():
            vectors = hparams[key]
            pairs = zip(vectors, value, strict=True) if isinstance(vectors, tuple) else [(vectors, value)]
            for vector, own in pairs:
                vector[row] = torch.as_tensor(own, dtype=torch.float64)

    def exploit(self, pairs: Sequence[tuple[str, str]], explored: Sequence[tuple[dict[str, Any], Suggestion]]) -> None:
        """Let each second become a copy of the first, with what was explored from its suggestions."""
        assert self.population is not None
        rows = [[self.population.row(pair[place]) for pair in pairs] for place in range(2)]
        self.population.copy(*rows)
        for (_, tag), (params, suggestion) in zip(pairs, explored, strict=True):
            self.seats[tag].params, self.seats[tag].suggestion = params, suggestion
            self._write(tag, suggestion.hypers)

    @property
    def options(self) -> dict[str, Any]:
        """Of its population."""
        optimizer = self._recipe.optimizer_with(self._first.suggestion.options)
        return {"optimizer": optimizer, "loss": self._recipe.loss, "compile": self._recipe.compile}

    def epoch(self, seed: int) -> dict[str, float]:
        """Train all members for an epoch under a seed, and evaluate them: a value for each tag; NaN if it went bad."""
        assert self.population is not None
        pop, recipe = self.population, self._recipe
        with _seeded(recipe.loader, seed):
            losses = [pop.step(inputs, target) for inputs, target in _batches("loader", recipe.loader, recipe.device)]
        trained = torch.stack(losses).double().mean(0)
        # Nobody needs gradients until the next step; another array may use their memory.
        pop.fused.zero_grad()
        bad = set(pop.frozen)
        found = trained
        if recipe.evaluates:
            role, loader = recipe.judged
            with _seeded(loader, seed):
                found = pop.evaluate(recipe.metric or recipe.loss, _batches(role, loader, recipe.device))
        values = found.tolist()
        return {tag: float("nan") if row in bad else values[row] for row, tag in enumerate(pop.tags) if tag is not None}

    def leave(self, tag: str) -> nn.Module:
        """The member's model, on the CPU; its row is free."""
        assert self.population is not None
        del self.seats[tag]
        model: nn.Module = self.population.stop(self.population.row(tag))
        return model.cpu()

    def compact(self) -> None:
        """Give back what free rows take."""
        if self.population is not None and self.seats:
            self.population.compact()
        elif not self.seats:
            self.population = None

    def fastest(self, most: int) -> int:
        """See `Footprint.fastest`."""
        if self._fastest is None:
            self._fastest = self.footprint.fastest(most)
        return self._fastest

    def restore(self, path: Path, seats: Sequence[Seat], model_of: Callable[[Seat], nn.Module]) -> None:
        """Be what was saved of the trials in ``seats``."""
        self.seats = {f"trial {seat.number}": seat for seat in seats}
        self.population = Population.load(path, lambda tag: model_of(self.seats[tag]), random=False, **self.options)


@contextmanager
def _seeded(loader: Iterable[Any], seed: int) -> Iterator[None]:
    """Inside, torch and the loader draw as after ``manual_seed(seed)``; afterwards all generators are as before."""
    own = [(each, each.get_state()) for each in generators(loader)]
    with random_states_kept():
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


def first_inputs(loader: Iterable[Any], device: torch.device) -> Any:
    """The inputs of its first minibatch; the loader's generators are then as before. Raises PlanError."""
    with _seeded(loader, 0):
        for inputs, _ in _batches("loader", loader, device):
            return inputs
    raise AssertionError("unreachable: a loader without minibatches is an error")

"""Groups of trials of one shape, with estimates before training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from hfusion.cluster.messages import DeviceInfo
from hfusion.tune.chosen_optimizer import optimizer_with, sample_optimizer
from hfusion.tune.epoch_batches import first_inputs, minibatches
from hfusion.tune.footprint import Footprint
from hfusion.tune.loaders import same_values
from hfusion.tune.plain_trials import torch_optimizer
from hfusion.tune.shape_array import Shape, ShapeArray
from hfusion.tune.space import ArrayChoices, TrialModel
from hfusion.tune.training_setup import SweepRecipe


class Shapes:
    """Assigns trials to shapes, which are groups that can share an array.

    Args:
        waves: the number of trials of the sweep, divided by the number that can train at once.
        saved: trials are saved, with copies on the host.
        may_be_plain: trials may be trained without an array.
    """

    def __init__(self, recipe: SweepRecipe, waves: float, *, saved: bool, may_be_plain: bool) -> None:
        self._recipe, self._waves, self._saved = recipe, waves, saved
        self._may_be_plain = may_be_plain and not recipe.compile
        self._inputs: list[tuple[Mapping[str, Any], Any]] = []

    def shape(self, candidate: TrialModel, arrays: Iterable[ShapeArray]) -> Shape:
        """Return the shape of an existing array that the trial can share, or a new shape."""
        for shape in {id(array.shape): array.shape for array in arrays}.values():
            if shape.takes(candidate):
                return shape
        minibatches, differ = self.minibatches(candidate), self._recipe.loaders.function is not None
        looped_minibatches = self._waves * minibatches if minibatches and self._may_loop(candidate) else None
        look = partial(self._footprint, candidate)
        return Shape(candidate, look, minibatches if differ and minibatches else 1, looped_minibatches)

    def _may_loop(self, first: TrialModel) -> bool:
        """Return whether trials like ``first`` may be trained in plain torch."""
        choices = first.suggestion.choices
        make = optimizer_with(choices.optimizer, choices.options, [first.suggestion.hypers])
        return self._may_be_plain and torch_optimizer(make, first.model) is not None

    def _first_inputs(self, choices: ArrayChoices) -> Any:
        for cached_values, inputs in self._inputs:
            if same_values(cached_values, choices.loader):
                return inputs
        # A copy, so that a forward that writes into its inputs does not change the loader's data.
        inputs = copy.deepcopy(first_inputs(self._recipe.loaders.loader(choices.loader), torch.device("cpu")))
        self._inputs.append((choices.loader, inputs))
        return inputs

    def minibatches(self, candidate: TrialModel) -> int | None:
        """Return the minibatches per epoch; None if the sweep has one loader for all trials, without a length."""
        loader = self._recipe.loaders.loader(candidate.suggestion.choices.loader)
        if self._recipe.loaders.function is None and not hasattr(loader, "__len__"):
            return None
        return minibatches(loader)

    def _footprint(self, first: TrialModel, device: DeviceInfo) -> Footprint:
        choices, judges = first.suggestion.choices, self._recipe.evaluates
        return Footprint(
            first.model,
            sample_optimizer(choices.optimizer, choices.options, [first.suggestion.hypers]).state_stacks,
            self._first_inputs(choices),
            device,
            evaluated=minibatches(self._recipe.judged(choices)[1]) if judges else 0,
            saved=self._saved,
        )

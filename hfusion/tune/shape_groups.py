"""Groups of trials of one shape, with estimates before training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hfusion.cluster.messages import DeviceInfo
from hfusion.tune.chosen_optimizer import optimizer_with, sample_optimizer
from hfusion.tune.epoch_batches import first_inputs, minibatches
from hfusion.tune.forward_equality import SameForward
from hfusion.tune.loaders import same_values
from hfusion.tune.plain_trial_footprint import PlainFootprint
from hfusion.tune.plain_trials import torch_optimizer
from hfusion.tune.shape_array import PlainForm, Shape, ShapeArray
from hfusion.tune.space import ArrayChoices, ModelMaker, TrialModel
from hfusion.tune.training_setup import SweepRecipe

if TYPE_CHECKING:
    from hfusion.tune.footprint import Footprint


class Shapes:
    """Assigns trials to shapes, which are groups that can share an array.

    Args:
        waves: the number of trials of the sweep, divided by the number that can train at once.
        saved: trials are saved, with copies on the host.
        may_be_plain: trials may be trained without an array.
    """

    def __init__(
        self, models: ModelMaker, recipe: SweepRecipe, waves: float, *, saved: bool, may_be_plain: bool
    ) -> None:
        self._models, self._recipe, self._waves, self._saved = models, recipe, waves, saved
        self._may_be_plain = may_be_plain and not recipe.compile
        self._inputs: list[tuple[Mapping[str, Any], Any]] = []

    def shape(self, candidate: TrialModel, arrays: Iterable[ShapeArray]) -> Shape:
        """Return the shape of an existing array that the trial can share, or a new shape."""
        for shape in {id(array.shape): array.shape for array in arrays}.values():
            if shape.takes(candidate):
                return shape
        inputs = partial(self._first_inputs, candidate.suggestion.choices)
        forward = SameForward(candidate.model, inputs, evaluates=self._recipe.evaluates)
        minibatches = self.minibatches(candidate)
        look, plain = partial(self._footprint, candidate), self._plain_form(candidate, minibatches)
        differ = self._recipe.loaders.function is not None
        return Shape(candidate, look, forward, minibatches if differ and minibatches else 1, plain)

    def _plain_form(self, first: TrialModel, minibatches: int | None) -> PlainForm | None:
        """Return estimates for plain trials of a shape; None if they must be an array."""
        choices = first.suggestion.choices
        make = optimizer_with(choices.optimizer, choices.options, [first.suggestion.hypers])
        if minibatches is None or not self._may_be_plain:
            return None
        if torch_optimizer(make, first.model) is None:
            return None
        return PlainForm(partial(self._plain_footprint, first), minibatches, self._waves)

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

    def _plain_footprint(self, first: TrialModel, device: DeviceInfo) -> PlainFootprint:
        choices, judges = first.suggestion.choices, self._recipe.evaluates
        return PlainFootprint(
            first.model,
            sample_optimizer(choices.optimizer, choices.options, [first.suggestion.hypers]).state_stacks,
            self._first_inputs(choices),
            device,
            evaluated=minibatches(self._recipe.judged(choices)[1]) if judges else 0,
            saved=self._saved,
        )

    def _footprint(self, first: TrialModel, device: DeviceInfo) -> Footprint:
        # Imported late: it imports the compiler, which is needed only when a shape becomes an array.
        from hfusion.tune.footprint import Footprint

        # Two models of the same trial, to detect tensors that models share.
        models = [self._models.model(first.number, first.suggestion) for _ in range(2)]
        choices, judges = first.suggestion.choices, self._recipe.evaluates
        return Footprint(
            models,
            optimizer_with(choices.optimizer, choices.options, [first.suggestion.hypers]),
            self._first_inputs(choices),
            device,
            evaluated=minibatches(self._recipe.judged(choices)[1]) if judges else 0,
            saved=self._saved,
        )

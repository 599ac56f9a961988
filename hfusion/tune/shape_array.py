"""The driver's bookkeeping of shapes and their arrays, one on each device. Nothing is trained here."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hfusion.capture.compare_models import check_pair
from hfusion.capture.registered_tensors import tensors
from hfusion.cluster.messages import DeviceInfo
from hfusion.core.errors import FusionError
from hfusion.core.row_indices import Widths
from hfusion.tune.chosen_optimizer import optimizer_with, sample_optimizer
from hfusion.tune.footprint import Footprint, fastest_width
from hfusion.tune.loaders import first_inputs, minibatches, same_values
from hfusion.tune.plain_trials import torch_optimizer
from hfusion.tune.space import ArrayChoices, Suggestion, TrialModel
from hfusion.tune.training_setup import SweepRecipe


@dataclass
class TrialSlot:
    """A trial in an array.

    Attributes:
        began: the round of the sweep in which it started.
        epochs: the number of epochs that it has trained.
        params: None, or its parameters after it became a copy of another trial.
        origin: the trial whose distributions ``params`` belong to.
    """

    number: int
    suggestion: Suggestion
    began: int
    epochs: int = 0
    params: dict[str, Any] | None = None
    origin: int | None = None

    @property
    def tag(self) -> str:
        return f"trial {self.number}"

    @property
    def is_last(self) -> bool:
        """True if the next epoch is its last one."""
        return self.epochs + 1 == self.suggestion.epochs


def seconds_saved(
    epochs: Sequence[int], minibatches: float, plain: float | None, footprint: Footprint, side_by_side: int
) -> float:
    """Return the seconds that an array saves; -inf without measurements, so that plain trials are measured first.

    Args:
        epochs: the remaining epochs of each trial.
        minibatches: minibatches per epoch, times the number of trials of the sweep over those that train at once.
        plain: measured seconds of a minibatch of one plain trial; None if nothing was measured yet.
        side_by_side: how many plain trials are trained at the same time.
    """
    if plain is None:
        return -math.inf
    looped = sum(epochs) / min(side_by_side, len(epochs)) * plain
    together = max(epochs) * footprint.array_seconds(len(epochs), plain)
    return minibatches * (looped - together) - footprint.startup


class Shape:
    """A group of trials that can share an array: models of one structure, with equal array choices.

    Args:
        first: the first trial of the shape, with which others are compared.
        look: returns the footprint of the shape on a device.
        minibatches: minibatches per epoch if shapes may differ in them, else 1.
        looped_minibatches: ``minibatches`` of `seconds_saved`; None if the trials must be an array.
    """

    def __init__(
        self,
        first: TrialModel,
        look: Callable[[DeviceInfo], Footprint],
        minibatches: int = 1,
        looped_minibatches: float | None = None,
    ) -> None:
        self.first, self._look, self.minibatches = first, look, minibatches
        self._looped_minibatches, self.is_array = looped_minibatches, looped_minibatches is None
        # Measured seconds of a minibatch of one plain trial.
        self.plain_seconds: float | None = None
        self._shared = 0
        self._footprints: dict[Any, Footprint] = {}
        self._fastest: dict[Any, int] = {}

    def takes(self, candidate: TrialModel) -> bool:
        """Return whether a trial can share an array with the trials of this shape."""
        if not candidate.suggestion.choices.matches(self.first.suggestion.choices):
            return False
        try:
            check_pair(self.first.model, 0, candidate.model)
        except FusionError:
            return False
        if candidate is not self.first:
            held = {id(tensor) for _, tensor in tensors(self.first.model)}
            self._shared = sum({id(t): t.nbytes for _, t in tensors(candidate.model) if id(t) in held}.values())
            for footprint in self._footprints.values():
                footprint.shared = self._shared
        return True

    def stay_plain(
        self, epochs: Sequence[int], device: DeviceInfo, side_by_side: int, fits: Callable[[], bool]
    ) -> bool:
        """Return whether trials with these remaining ``epochs`` are trained plain.

        Once an array is chosen, for which there must be room, later trials of the shape use arrays.
        """
        if self._looped_minibatches is not None and not self.is_array:
            footprint = self.footprint(device)
            saved = seconds_saved(epochs, self._looped_minibatches, self.plain_seconds, footprint, side_by_side)
            # Whether it fits is asked of a shape that is an array.
            self.is_array = saved > 0
            self.is_array = self.is_array and fits()
        return not self.is_array

    def footprint(self, device: DeviceInfo) -> Footprint:
        """Return the cached footprint on a device of this kind."""
        kind = _kind(device)
        if kind not in self._footprints:
            self._footprints[kind] = self._look(device)
            self._footprints[kind].shared = self._shared
        return self._footprints[kind]

    def fastest(self, device: DeviceInfo, most: int) -> int:
        """Return the cached `fastest_width` of at most ``most`` rows on a device of this kind."""
        kind = _kind(device)
        if kind not in self._fastest:
            self._fastest[kind] = fastest_width(self.footprint(device).seconds, most)
        return self._fastest[kind]


def _kind(device: DeviceInfo) -> Any:
    return device.physical, device.rates


class ShapeArray:
    """An array of trials of a shape on the device with index ``device``. Trials in ``joining`` wait for a row."""

    def __init__(self, name: str, shape: Shape, device: int) -> None:
        self.name, self.shape, self.device = name, shape, device
        self.slots: dict[str, TrialSlot] = {}
        self.joining: list[TrialModel] = []
        self.widths: Widths | None = None
        # The number of rows, free ones too.
        self.width = 0
        self.plain = False
        # True from the start of an epoch until its result is reported.
        self.training = False
        # Path of its last save, relative to the sweep's folder; empty if it has changed since.
        self.save = ""

    @property
    def round(self) -> int | None:
        """The round that it trains next, counted as `TrialSlot.began`; None without trials."""
        return next((slot.began + slot.epochs for slot in self.slots.values()), None)

    def promote(self, name: str) -> None:
        """Turn plain trials into an array with a new name."""
        self.name, self.plain, self.save = name, False, ""
        self.widths, self.width = Widths(len(self.slots)), len(self.slots)

    @property
    def trial_count(self) -> int:
        """Number of trials that have a row or wait for one."""
        return len(self.slots) + len(self.joining)

    @property
    def any_ends(self) -> bool:
        """True if the next epoch is the last one of a trial."""
        return any(slot.is_last for slot in self.slots.values())

    def least(self, more: int = 0) -> int:
        """Return the number of rows with ``more`` members, after free rows are released."""
        members = self.trial_count + more
        return members if self.widths is None or not members else self.widths.of(members)

    def rows(self, more: int = 0) -> int:
        """Return the number of rows with ``more`` members."""
        return self.least(more) if self.plain else max(self.width, self.least(more))

    def assign_slots(self, round_: int) -> Sequence[TrialModel]:
        """Give rows to waiting trials, and return them. Their first round is the array's next one, else ``round_``."""
        self.width, self.save = self.rows(), ""
        began = round_ if self.round is None else self.round
        new, self.joining = self.joining, []
        if not self.plain:
            self.widths = self.widths or Widths(len(new))
        self.slots |= {member.tag: TrialSlot(member.number, member.suggestion, began) for member in new}
        return new


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

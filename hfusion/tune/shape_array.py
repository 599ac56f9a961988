"""The driver's bookkeeping of an array: the trials of one shape on one device. Nothing is trained here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hfusion.capture.compare_models import check_pair
from hfusion.capture.registered_tensors import tensors
from hfusion.cluster.messages import DeviceInfo
from hfusion.core.errors import FusionError
from hfusion.core.row_indices import Widths
from hfusion.tune.footprint import Footprint, fastest_width
from hfusion.tune.space import Suggestion, TrialModel


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


@dataclass(frozen=True)
class ArrayChoice:
    """The decision whether trials of one shape become an array.

    Attributes:
        epochs: the remaining epochs of each trial.
        minibatches: minibatches per epoch, times the number of trials of the sweep over those that train at once.
        plain: measured seconds of a minibatch of one plain trial; None if nothing was measured yet.
        array: seconds of a minibatch of an array of all trials, estimated from ``plain``.
        startup: seconds that it takes to create the array.
        side_by_side: how many plain trials are trained at the same time.
    """

    epochs: tuple[int, ...]
    minibatches: float
    plain: float | None
    array: float
    startup: float
    side_by_side: int


def seconds_saved(choice: ArrayChoice) -> float:
    """Return the seconds that an array saves; -inf without measurements, so that plain trials are measured first."""
    if choice.plain is None:
        return -math.inf
    plain_seconds = sum(choice.epochs) / min(choice.side_by_side, len(choice.epochs)) * choice.plain
    array_seconds = max(choice.epochs) * choice.array
    return choice.minibatches * (plain_seconds - array_seconds) - choice.startup


class Shape:
    """A group of trials that can share an array: models of one structure, with equal array choices.

    Args:
        first: the first trial of the shape, with which others are compared.
        look: returns the footprint of the shape on a device.
        minibatches: minibatches per epoch if shapes may differ in them, else 1.
        looped_minibatches: see `ArrayChoice.minibatches`; None if the trials must be an array.
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

    def choose_form(self, choice: ArrayChoice | None, fits: Callable[[], bool]) -> bool:
        """Return whether trials are trained plain. Once an array is chosen, later trials of the shape use arrays."""
        if self.is_array or choice is None:
            return False
        self.is_array = seconds_saved(choice) > 0
        self.is_array = self.is_array and fits()
        return not self.is_array

    def choice(self, epochs: Sequence[int], device: DeviceInfo, side_by_side: int) -> ArrayChoice | None:
        """Return the estimates for trials with these remaining ``epochs``; None if they must be an array."""
        if self._looped_minibatches is None:
            return None
        footprint, plain = self.footprint(device), self.plain_seconds
        array = math.inf if plain is None else footprint.array_seconds(len(epochs), plain)
        return ArrayChoice(tuple(epochs), self._looped_minibatches, plain, array, footprint.startup, side_by_side)

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

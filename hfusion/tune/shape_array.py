"""The driver's bookkeeping of an array: the trials of one shape on one device. Nothing is trained here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfusion.capture.compare_models import check_pair
from hfusion.cluster.messages import DeviceInfo
from hfusion.core.errors import FusionError
from hfusion.core.row_indices import Widths
from hfusion.tune.array_costs import ArrayCosts, ArrayRecord
from hfusion.tune.epoch_result import EpochResult
from hfusion.tune.forward_equality import SameForward
from hfusion.tune.plain_trial_footprint import PlainFootprint, fastest_width
from hfusion.tune.space import Suggestion, TrialModel

if TYPE_CHECKING:
    from hfusion.tune.footprint import Footprint


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
class PlainForm:
    """Estimates for the trials of a shape in plain torch.

    Attributes:
        look: returns the footprint of plain trials on a device.
        minibatches: minibatches per epoch.
        waves: the number of trials of the sweep, divided by the number that can train at once.
    """

    look: Callable[[DeviceInfo], PlainFootprint]
    minibatches: int
    waves: float


@dataclass(frozen=True)
class ArrayChoice:
    """The decision whether trials of one shape become an array.

    Attributes:
        epochs: the remaining epochs of each trial.
        minibatches: minibatches per epoch, times `PlainForm.waves`.
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
    """A group of trials that can share an array: equal shapes, forwards and array choices.

    Args:
        first: the first trial of the shape, with which others are compared.
        look: returns the footprint of an array of the shape on a device.
        forward: compares the forward of a model with that of the first trial.
        minibatches: minibatches per epoch if shapes may differ in them, else 1.
        plain: estimates for plain trials; None if the trials must be an array.
    """

    def __init__(
        self,
        first: TrialModel,
        look: Callable[[DeviceInfo], Footprint],
        forward: SameForward,
        minibatches: int = 1,
        plain: PlainForm | None = None,
    ) -> None:
        self.first, self._look, self._forward, self.minibatches = first, look, forward, minibatches
        self._plain, self.is_array = plain, plain is None
        # Measured seconds of a minibatch of one plain trial, and of the creation of an array.
        self.plain_seconds: float | None = None
        self.startup = 0.0
        self._footprints: dict[Any, Footprint | PlainFootprint] = {}
        self._fastest: dict[Any, int] = {}

    def takes(self, candidate: TrialModel) -> bool:
        """Return whether a trial can share an array with the trials of this shape."""
        if not candidate.suggestion.choices.matches(self.first.suggestion.choices):
            return False
        try:
            check_pair(self.first.model, 0, candidate.model)
        except FusionError:
            return False
        return self._forward.same_as(candidate.model)

    def choose_form(self, choice: ArrayChoice | None, fits: Callable[[], bool]) -> bool:
        """Return whether trials are trained plain. Once an array is chosen, later trials of the shape use arrays."""
        if self.is_array or choice is None:
            return False
        if not seconds_saved(choice) > 0:
            return True
        self.is_array, began = True, time.perf_counter()
        if not fits():
            self.is_array = False
        self.startup = time.perf_counter() - began
        return not self.is_array

    def choice(
        self, epochs: Sequence[int], device: DeviceInfo, costs: ArrayCosts, side_by_side: int
    ) -> ArrayChoice | None:
        """Return the estimates for trials with these remaining ``epochs``; None if they must be an array."""
        if self._plain is None:
            return None
        footprint = self.plain_footprint(device)
        ratio = costs.plain(footprint.operators)
        plain = self.plain_seconds or (None if ratio is None else ratio * footprint.seconds(1))
        array = (
            math.inf
            if plain is None
            else footprint.array_seconds(len(epochs), plain) * costs.factor(footprint.operators)
        )
        return ArrayChoice(
            tuple(epochs),
            self._plain.minibatches * self._plain.waves,
            plain,
            array,
            costs.startup(footprint.operators),
            side_by_side,
        )

    def note(self, array: ShapeArray, result: EpochResult, device: DeviceInfo, costs: ArrayCosts) -> None:
        """Update the estimates of plain trials and arrays from a measured epoch."""
        seconds = result.seconds / result.steps
        if self._plain is None:
            return
        if array.plain:
            self.plain_seconds = seconds / max(1, len(result.values))
        elif self.plain_seconds is not None and not array.measured:
            footprint = self.plain_footprint(device)
            factor = seconds / footprint.array_seconds(max(1, array.width), self.plain_seconds)
            startup = max(1e-6, self.startup + result.startup)
            costs.note(ArrayRecord(footprint.operators, startup, self.plain_seconds / footprint.seconds(1), factor))
        array.measured = True

    def plain_footprint(self, device: DeviceInfo) -> PlainFootprint:
        """Return the cached footprint of plain trials on a device of this kind."""
        assert self._plain is not None
        kind = _kind(device), False
        if kind not in self._footprints:
            self._footprints[kind] = self._plain.look(device)
        footprint = self._footprints[kind]
        assert isinstance(footprint, PlainFootprint)
        return footprint

    def footprint(self, device: DeviceInfo) -> Footprint | PlainFootprint:
        """Return the cached footprint on a device of this kind: of arrays, by a capture, once the shape uses arrays."""
        kind = _kind(device), self.is_array
        if kind not in self._footprints:
            look = self._look if self._plain is None or self.is_array else self._plain.look
            self._footprints[kind] = look(device)
        return self._footprints[kind]

    def fastest(self, device: DeviceInfo, most: int) -> int:
        """Return the cached `fastest_width` of at most ``most`` rows on a device of this kind."""
        kind = _kind(device), self.is_array
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
        self.width = 0
        self.plain = self.measured = False
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
        self.name, self.plain, self.measured, self.save = name, False, False, ""
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
        return members if self.widths is None else self.widths.of(members) if members else 0

    def rows(self, more: int = 0) -> int:
        """Return the number of rows with ``more`` members."""
        members = self.trial_count + more
        if self.widths is None:
            return members
        return self.width if members <= self.width else self.widths.of(members)

    def assign_slots(self, round_: int) -> Sequence[TrialModel]:
        """Give rows to waiting trials, and return them. Their first round is the array's next one, else ``round_``."""
        self.width, self.save = self.rows(), ""
        began = round_ if self.round is None else self.round
        new, self.joining = self.joining, []
        if not self.plain:
            self.widths = self.widths or Widths(len(new))
        self.slots |= {member.tag: TrialSlot(member.number, member.suggestion, began) for member in new}
        return new

    def compacts(self) -> bool:
        """Release free rows; return whether there were any."""
        if self.widths is None:
            self.width = len(self.slots)
            return False
        least = self.widths.of(len(self.slots))
        any_free, self.width = least < self.width, min(least, self.width)
        return any_free

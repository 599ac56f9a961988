"""The trials of one shape on one device, as the driver of a sweep knows them: numbers, nothing is trained here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hfusion.capture.compare import check_pair
from hfusion.capture.named import tensors
from hfusion.cluster.node import DeviceInfo
from hfusion.core.errors import FusionError
from hfusion.population.widths import Widths
from hfusion.tune.footprint import Footprint
from hfusion.tune.forwards import SameForward
from hfusion.tune.plain_footprint import PlainFootprint
from hfusion.tune.space import Suggestion, TrialModel


@dataclass
class Seat:
    """A trial in an array: ``began`` in which round of the sweep, ``epochs`` that it has trained.

    ``params``: what it has instead of its suggestions, once it became a copy of another; they are of the names and
    distributions of trial ``origin``.
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
        """Whether the next epoch is its last one."""
        return self.epochs + 1 == self.suggestion.epochs


# What the captures of an array take, in steps of one plain trial, and what a step of an array takes beside its numbers.
# Estimates, no fit: on an AMD EPYC of the fourth generation one capture of an MLP of two to four layers and its
# evaluation took 240 to 590 plain steps, of which arrays that change their width need several, and an eager step of
# 2, 8 and 16 members 2.4 to 3.7, 3.9 to 8.5 and 4.9 to 15 plain ones.
_CAPTURE_STEPS: float = 1750.0
_ARRAY_STEP = 1.7


@dataclass(frozen=True)
class PlainForm:
    """What is known of the trials of a shape in plain torch.

    Attributes:
        look: gives their footprint on a device.
        minibatches: of an epoch.
        waves: how many trials of the sweep there are for each that can train at once.
    """

    look: Callable[[DeviceInfo], PlainFootprint]
    minibatches: int
    waves: float

    def array_pays(self, new: Sequence[TrialModel]) -> bool:
        """Whether an array of these trials saves more than its captures take, by counts alone.

        Trials whose models share tensors are an array, which knows of that.
        """
        seen = [id(tensor) for member in new for tensor in {id(t): t for _, t in tensors(member.model)}.values()]
        if len(set(seen)) < len(seen):
            return True
        steps = self.minibatches * self.waves * max(member.suggestion.epochs for member in new)
        return steps * (len(new) - _ARRAY_STEP) > _CAPTURE_STEPS


class Shape:
    """Models of one shape that do the same in forward, trained with the same choices of all that an array shares.

    Args:
        look: gives its footprint on a device, as an array.
        forward: compares forwards with that of the first.
        minibatches: of an epoch, where shapes differ in that; else 1.
        plain: what is known of its trials in plain torch; None where they must be an array.
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
        self._footprints: dict[Any, Footprint | PlainFootprint] = {}
        self._fastest: dict[Any, int] = {}

    def takes(self, candidate: TrialModel) -> bool:
        """Whether the trial is one of them."""
        if not candidate.suggestion.choices.matches(self.first.suggestion.choices):
            return False
        try:
            check_pair(self.first.model, 0, candidate.model)
        except FusionError:
            return False
        return self._forward.same_as(candidate.model)

    def choose_form(self, new: Sequence[TrialModel], fits: Callable[[], bool]) -> bool:
        """Return whether trials that are the first of an array are plain. Then the shape may become one of arrays."""
        if self.is_array or self._plain is None:
            return False
        if not self._plain.array_pays(new):
            return True
        self.is_array = True
        if not fits():
            self.is_array = False
        return not self.is_array

    def footprint(self, device: DeviceInfo) -> Footprint | PlainFootprint:
        """On a device of this kind: of arrays, which takes a capture, once the shape has some."""
        kind = _kind(device), self.is_array
        if kind not in self._footprints:
            look = self._look if self._plain is None or self.is_array else self._plain.look
            self._footprints[kind] = look(device)
        return self._footprints[kind]

    def fastest(self, device: DeviceInfo, most: int) -> int:
        """See `Footprint.fastest`."""
        kind = _kind(device), self.is_array
        if kind not in self._fastest:
            self._fastest[kind] = self.footprint(device).fastest(most)
        return self._fastest[kind]


def _kind(device: DeviceInfo) -> Any:
    return device.physical, device.rates


class ShapeArray:
    """An array: trials of a shape on the device of number ``device``; ``joining`` are those that wait for `seated`."""

    def __init__(self, name: str, shape: Shape, device: int) -> None:
        self.name, self.shape, self.device = name, shape, device
        self.seats: dict[str, Seat] = {}
        self.joining: list[TrialModel] = []
        self.widths: Widths | None = None
        self.width = 0
        self.plain = False

    def choose_form(self, fits: Callable[[], bool]) -> None:
        """See `Shape.choose_form`."""
        self.plain = self.shape.choose_form(self.joining, fits)

    @property
    def taken(self) -> int:
        """Rows that are taken, or will be."""
        return len(self.seats) + len(self.joining)

    @property
    def any_ends(self) -> bool:
        """Whether the next epoch is the last one of a trial."""
        return any(seat.is_last for seat in self.seats.values())

    def least(self, more: int = 0) -> int:
        """How many rows it has with so many more members, once free rows are given back."""
        members = self.taken + more
        return members if self.widths is None else self.widths.of(members) if members else 0

    def rows(self, more: int = 0) -> int:
        """How many rows there are, with so many more members."""
        members = self.taken + more
        if self.widths is None:
            return members
        return self.width if members <= self.width else self.widths.of(members)

    def seated(self, round_: int) -> Sequence[TrialModel]:
        """Those that waited have rows from now on."""
        self.width = self.rows()
        new, self.joining = self.joining, []
        if not self.plain:
            self.widths = self.widths or Widths(len(new))
        self.seats |= {one.tag: Seat(one.number, one.suggestion, round_) for one in new}
        return new

    def compacts(self) -> bool:
        """Whether there are free rows to give back; they are given back then."""
        if self.widths is None:
            self.width = len(self.seats)
            return False
        least = self.widths.of(len(self.seats))
        found, self.width = least < self.width, min(least, self.width)
        return found

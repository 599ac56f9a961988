"""The trials of one shape on one device, as the driver of a sweep knows them: numbers, nothing is trained here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hfusion.capture.compare import check_pair
from hfusion.cluster.node import DeviceInfo
from hfusion.core.errors import FusionError
from hfusion.population.widths import Widths
from hfusion.tune.footprint import Footprint
from hfusion.tune.forwards import SameForward
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


class Shape:
    """Models of one shape that do the same in forward, trained with the same choices of all that an array shares.

    Args:
        look: gives its footprint on a device.
        forward: compares forwards with that of the first.
        minibatches: of an epoch, where shapes differ in that; else 1.
    """

    def __init__(
        self,
        first: TrialModel,
        look: Callable[[DeviceInfo], Footprint],
        forward: SameForward,
        minibatches: int = 1,
    ) -> None:
        self.first, self._look, self._forward, self.minibatches = first, look, forward, minibatches
        self._footprints: dict[Any, Footprint] = {}
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

    def footprint(self, device: DeviceInfo) -> Footprint:
        """On a device of this kind."""
        kind = _kind(device)
        if kind not in self._footprints:
            self._footprints[kind] = self._look(device)
        return self._footprints[kind]

    def fastest(self, device: DeviceInfo, most: int) -> int:
        """See `Footprint.fastest`."""
        kind = _kind(device)
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
        self.widths = self.widths or Widths(len(new))
        self.seats |= {one.tag: Seat(one.number, one.suggestion, round_) for one in new}
        return new

    def compacts(self) -> bool:
        """Whether there are free rows to give back; they are given back then."""
        assert self.widths is not None
        least = self.widths.of(len(self.seats))
        found, self.width = least < self.width, min(least, self.width)
        return found

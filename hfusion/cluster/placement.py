"""Assign arrays to devices from cost estimates, without contacting any worker.

Arrays start longest first: whoever is idle takes the next one (R. Graham, 1969).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hfusion.core.errors import PlanError


@dataclass(frozen=True)
class Load:
    """An array, and its estimated seconds on each kind of device; None where it does not fit."""

    name: str
    seconds: tuple[float | None, ...]

    @cached_property
    def least(self) -> float:
        """Seconds on the fastest kind of device. Raises PlanError if the array fits no kind."""
        fitting = [seconds for seconds in self.seconds if seconds is not None]
        if not fitting:
            raise PlanError(
                f"the array {self.name!r} fits no device of the cluster: give more memory, or fewer members"
            )
        return min(fitting)


def relative_speeds(loads: Sequence[Load], kinds: int) -> list[float]:
    """Return the speed of each kind of device on the array that suits it best, relative to the fastest kind."""
    return [
        max((load.least / seconds for load in loads if (seconds := load.seconds[kind])), default=0.0)
        for kind in range(kinds)
    ]


def lower_bound(loads: Sequence[Load], kinds: Sequence[int]) -> float:
    """Return a lower bound, in seconds, for the time that any placement takes.

    It is the larger of two: the longest array on its fastest kind of device, and all work shared by all devices.
    """
    least, speeds = [load.least for load in loads], relative_speeds(loads, max(kinds) + 1)
    return max(max(least, default=0.0), math.fsum(least) / math.fsum(speeds[kind] for kind in kinds))


class Placement:
    """The array that each device trains, and the arrays that wait.

    A running array stays on its device until it ends or the device is lost. A device that is slower by the estimates
    takes an array only if the run does not end later by it.

    Args:
        kinds: the kind of each device, an index into ``Load.seconds``.
        max_failures: how often the device of an array may be lost before the array is given up.
        clock: returns the time in seconds.

    Raises:
        PlanError: an array fits no device.
    """

    def __init__(
        self, loads: Sequence[Load], kinds: Sequence[int], max_failures: int, clock: Callable[[], float]
    ) -> None:
        self._loads, self._kinds, self._max_failures, self._clock = list(loads), list(kinds), max_failures, clock
        # The array that runs on each busy device, and when it ends by the estimates.
        self._running: dict[int, tuple[int, float]] = {}
        self._lost_devices: set[int] = set()
        self.failures = [0] * len(loads)
        # The arrays that fit none of the remaining devices.
        self.stranded: list[int] = []
        self._waiting: list[int] = []
        self._queue(range(len(loads)))

    @property
    def over(self) -> bool:
        """True if no array runs or waits."""
        return not self._running and not self._waiting and not self.stranded

    @property
    def lower_bound(self) -> float:
        """A lower bound for the seconds of the run, by estimates for all devices, lost ones included."""
        return lower_bound(self._loads, self._kinds)

    def starts(self) -> Iterator[tuple[int, int]]:
        """Yield each idle device that begins an array now, and that array."""
        for device in range(len(self._kinds)):
            if not self._waiting:
                return
            if device not in self._running and device not in self._lost_devices:
                number = self._next_array(device)
                if number is not None:
                    self._waiting.remove(number)
                    seconds = self._loads[number].seconds[self._kinds[device]] or 0.0
                    self._running[device] = number, self._clock() + seconds
                    yield device, number

    def _next_array(self, device: int) -> int | None:
        """Return the longest waiting array for an idle device, or the shortest if only that pays; else None."""
        kind = self._kinds[device]
        fitting = [number for number in self._waiting if self._loads[number].seconds[kind] is not None]
        ends = (number for number in (fitting[:1] + fitting[-1:]) if self._pays(number, device))
        return next(ends, None)

    def _pays(self, number: int, device: int) -> bool:
        """Return whether an array ends on an idle device before the others are done, or could end it themselves."""
        seconds, now = self._loads[number].seconds, self._clock()
        own = seconds[self._kinds[device]] or 0.0
        if own <= self._loads[number].least:
            return True
        work, speed, elsewhere = math.fsum(self._loads[other].least for other in self._waiting), 0.0, math.inf
        for other, kind in enumerate(self._kinds):
            if other not in self._lost_devices:
                left = max(0.0, self._running[other][1] - now) if other in self._running else 0.0
                work, speed = work + left * self._speeds[kind], speed + self._speeds[kind]
                if other != device and (there := seconds[kind]) is not None:
                    elsewhere = min(elsewhere, left + there)
        return own <= max(work / speed, elsewhere)

    def end(self, device: int) -> int:
        """Note that the array on a device has ended or failed, and return its index."""
        return self._running.pop(device)[0]

    def lose(self, device: int, *, back: bool) -> list[int]:
        """Note that a device was lost; ``back``: it was restarted. Return its array if it must be given up.

        Otherwise that array waits again.
        """
        waiting, given_up = [*self._waiting, *self.stranded], list[int]()
        if device in self._running:
            number = self.end(device)
            self.failures[number] += 1
            (waiting if self.failures[number] <= self._max_failures else given_up).append(number)
        if not back:
            self._lost_devices.add(device)
        self._queue(waiting)
        return given_up

    def join(self, kind: int, seconds: Sequence[float | None] | None = None) -> None:
        """Append a device of this kind; if the kind is new, ``seconds`` are the estimates of each array on it."""
        if seconds is not None:
            pairs = zip(self._loads, seconds, strict=True)
            self._loads = [replace(load, seconds=(*load.seconds, estimate)) for load, estimate in pairs]
        self._kinds.append(kind)
        self._queue([*self._waiting, *self.stranded])

    def give_up_stranded(self) -> list[int]:
        """Return the stranded arrays and forget them."""
        stranded, self.stranded = self.stranded, []
        return stranded

    def _queue(self, waiting: Iterable[int]) -> None:
        """Let arrays wait, the longest first. Those that fit no remaining device become stranded."""
        self._speeds = relative_speeds(self._loads, max(self._kinds) + 1)
        kinds = {kind for device, kind in enumerate(self._kinds) if device not in self._lost_devices}
        order = sorted(waiting, key=lambda number: (-self._loads[number].least, number))
        self._waiting = [n for n in order if any(self._loads[n].seconds[kind] is not None for kind in kinds)]
        self.stranded = sorted(set(order).difference(self._waiting))

"""Which device trains which array: numbers only, no process is asked.

Arrays go to devices longest first, each to the device on which it would end first (R. Graham, 1969; on machines of
different speeds E. Horowitz and S. Sahni, 1976), and where estimates were wrong, a device without work takes of what
waits for another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from hfusion.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Load:
    """An array: its seconds on each kind of device, None where it does not fit."""

    name: str
    seconds: tuple[float | None, ...]

    @property
    def least(self) -> float:
        """Seconds on the fastest kind. Raises PlanError where it fits none."""
        found = [each for each in self.seconds if each is not None]
        if not found:
            raise PlanError(
                f"the array {self.name!r} fits no device of the cluster: give more memory, or fewer members"
            )
        return min(found)


def place(
    loads: Sequence[Load], waiting: Iterable[int], kinds: Sequence[int], busy: Sequence[float | None]
) -> list[list[int]]:
    """The arrays of every device, in the order in which it trains them.

    Args:
        waiting: the numbers of those that are to be placed.
        kinds: of each device.
        busy: for how many seconds each device has work already; None where it is gone.

    Raises:
        PlanError: an array fits no device that is there.
    """
    heaps: dict[int, list[tuple[float, int]]] = {}
    for device, (kind, free) in enumerate(zip(kinds, busy, strict=True)):
        if free is not None:
            heaps.setdefault(kind, []).append((free, device))
    for heap in heaps.values():
        heapify(heap)
    found: list[list[int]] = [[] for _ in kinds]
    for number in sorted(waiting, key=lambda number: (-loads[number].least, number)):
        seconds = loads[number].seconds
        ends = [(heap[0][0] + each, kind) for kind, heap in heaps.items() if (each := seconds[kind]) is not None]
        if not ends:
            raise PlanError(f"the array {loads[number].name!r} fits none of the devices that are left")
        end, kind = min(ends)
        device = heaps[kind][0][1]
        heapreplace(heaps[kind], (end, device))
        found[device].append(number)
    return found


def lower_bound(loads: Sequence[Load], kinds: Sequence[int]) -> float:
    """Seconds that no placement beats: the longest array on its fastest device, and all work at the best speeds.

    The speed of a kind of device is that which it has for the array that it suits best.
    """
    least = [load.least for load in loads]
    speeds = [
        max((best / each for load, best in zip(loads, least, strict=True) if (each := load.seconds[kind])), default=0.0)
        for kind in range(max(kinds) + 1)
    ]
    return max(max(least, default=0.0), math.fsum(least) / math.fsum(speeds[kind] for kind in kinds))


class Placement:
    """What every device trains now, and what next.

    Args:
        kinds: of each device; an index into ``load.seconds``.
        max_failures: how often the device of an array may be lost before the array is given up.
        clock: seconds.

    Raises:
        PlanError: an array that fits no device.
    """

    def __init__(
        self, loads: Sequence[Load], kinds: Sequence[int], max_failures: int, clock: Callable[[], float]
    ) -> None:
        self._loads, self._kinds, self._max_failures, self._clock = loads, kinds, max_failures, clock
        self._queues: list[deque[int]] = []
        self._waiting = [0.0] * len(kinds)
        self._running: dict[int, tuple[int, float]] = {}
        self._gone: set[int] = set()
        self.failures = [0] * len(loads)
        self._arrange(range(len(loads)))

    @property
    def idle(self) -> list[int]:
        """The devices that are there and train nothing."""
        busy = self._gone.union(self._running)
        return [device for device in range(len(self._kinds)) if device not in busy]

    @property
    def over(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not any(self._queues)

    def _seconds(self, number: int, device: int) -> float | None:
        return self._loads[number].seconds[self._kinds[device]]

    def _left(self, device: int) -> float:
        """Seconds until what runs there will have ended."""
        if device not in self._running:
            return 0.0
        number, begun = self._running[device]
        return max(0.0, begun + (self._seconds(number, device) or 0.0) - self._clock())

    def _arrange(self, waiting: Collection[int]) -> None:
        busy = [None if device in self._gone else self._left(device) for device in range(len(self._kinds))]
        self._queues = [deque(each) for each in place(self._loads, waiting, self._kinds, busy)]
        for device, queue in enumerate(self._queues):
            self._waiting[device] = math.fsum(self._seconds(number, device) or 0.0 for number in queue)

    def begin(self, device: int) -> int | None:
        """The array that an idle device trains next; None: nothing that is left would end there sooner."""
        owner = device if self._queues[device] else self._taken_from(device)
        if owner is None:
            return None
        number = self._queues[owner].popleft() if owner == device else self._queues[owner].pop()
        self._waiting[owner] -= self._seconds(number, owner) or 0.0
        self._running[device] = (number, self._clock())
        return number

    def _taken_from(self, device: int) -> int | None:
        """Whose last array would end here no later than there: that of the device with most to do."""
        order = sorted(
            (each for each in range(len(self._queues)) if self._queues[each]),
            key=lambda each: self._waiting[each],
            reverse=True,
        )
        for owner in order:
            seconds = self._seconds(self._queues[owner][-1], device)
            if seconds is not None and seconds <= self._waiting[owner] + self._left(owner):
                return owner
        return None

    def end(self, device: int) -> int:
        """The array that a device has trained, or failed to."""
        return self._running.pop(device)[0]

    def lose(self, device: int, *, back: bool) -> list[int]:
        """A device is lost, or was and is ``back``; those that are given up, of which nothing runs any more.

        The array that ran there waits again, and all that waits is placed anew.
        """
        waiting = [number for queue in self._queues for number in queue]
        lost: list[int] = []
        if device in self._running:
            number = self.end(device)
            self.failures[number] += 1
            (waiting if self.failures[number] <= self._max_failures else lost).append(number)
        if not back:
            self._gone.add(device)
        there = {kind for other, kind in enumerate(self._kinds) if other not in self._gone}
        fits = [any(self._loads[number].seconds[kind] is not None for kind in there) for number in waiting]
        self._arrange([number for number, fit in zip(waiting, fits, strict=True) if fit])
        return [*lost, *(number for number, fit in zip(waiting, fits, strict=True) if not fit)]

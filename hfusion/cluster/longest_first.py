"""Place arrays on devices longest first, each on the device on which it would end first.

R. Graham, 1969; on machines of different speeds E. Horowitz and S. Sahni, 1976.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from hfusion.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Load:
    """An array: estimated seconds on each kind of device (None if it does not fit), its task, and its minibatches."""

    name: str
    seconds: tuple[float | None, ...]
    task: str
    steps: int

    @property
    def least(self) -> float:
        """Seconds on the fastest kind of device. Raises PlanError if the array fits no kind."""
        fitting = [seconds for seconds in self.seconds if seconds is not None]
        if not fitting:
            raise PlanError(
                f"the array {self.name!r} fits no device of the cluster: give more memory, or fewer members"
            )
        return min(fitting)


def place_arrays(
    loads: Sequence[Load],
    waiting: Mapping[int, float],
    kinds: Sequence[int],
    busy: Sequence[float | None],
    slow: Sequence[float],
) -> list[list[int]]:
    """Return the arrays of every device, in the order in which the device trains them.

    Args:
        waiting: the arrays to place, each with a factor by which its estimated seconds are multiplied.
        kinds: the kind of each device, an index into ``Load.seconds``.
        busy: for how many seconds each device already has work; None for a lost device.
        slow: for each device, a factor by which all estimated seconds are multiplied.

    Raises:
        PlanError: an array fits none of the remaining devices.
    """
    heaps: dict[tuple[int, float], list[tuple[float, int]]] = {}
    for device, (kind, busy_seconds) in enumerate(zip(kinds, busy, strict=True)):
        if busy_seconds is not None:
            heaps.setdefault((kind, slow[device]), []).append((busy_seconds, device))
    for heap in heaps.values():
        heapify(heap)
    placed: list[list[int]] = [[] for _ in kinds]
    for number in sorted(waiting, key=lambda number: (-loads[number].least * waiting[number], number)):
        seconds, factor = loads[number].seconds, waiting[number]
        ends = [
            (heap[0][0] + estimate * factor * key[1], key)
            for key, heap in heaps.items()
            if (estimate := seconds[key[0]]) is not None
        ]
        if not ends:
            raise PlanError(f"the array {loads[number].name!r} fits none of the devices that are left")
        end, key = min(ends)
        device = heaps[key][0][1]
        heapreplace(heaps[key], (end, device))
        placed[device].append(number)
    return placed


def lower_bound(loads: Sequence[Load], kinds: Sequence[int]) -> float:
    """Return a lower bound, in seconds, for the time that any placement takes.

    It is the larger of two: the longest array on its fastest kind of device; and all work shared by all devices, each
    with the speed, relative to the fastest kind, that it reaches on the array that suits it best.
    """
    least = [load.least for load in loads]
    speeds = [
        max(
            (best / seconds for load, best in zip(loads, least, strict=True) if (seconds := load.seconds[kind])),
            default=0.0,
        )
        for kind in range(max(kinds) + 1)
    ]
    return max(max(least, default=0.0), math.fsum(least) / math.fsum(speeds[kind] for kind in kinds))

"""Placing arrays on the devices of a cluster, simulated: what a decision costs, and how far the end is from the least.

What an array takes is up to a third more or less than was estimated, so that devices take from one another in the end.
"""

from __future__ import annotations

import random
import time
from heapq import heappop, heappush
from typing import NamedTuple

from hfusion.cluster.placement import Load, Placement, lower_bound


class Placed(NamedTuple):
    """``lower_bound``: by what arrays really took."""

    makespan: float
    lower_bound: float
    us_per_decision: float


class _VirtualClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def placed(arrays: int, devices: int, *, alike: bool, seed: int = 0) -> Placed:
    """One run; ``alike``: all devices are of one speed and all arrays of one length, else of three, up to 8-fold."""
    drawn, clock = random.Random(seed), _VirtualClock()
    speeds = (1.0,) if alike else (1.0, 2.0, 4.0)
    kinds = [drawn.randrange(len(speeds)) for _ in range(devices)]
    sizes = [1000.0 if alike else 1000.0 * drawn.uniform(0.25, 2.0) for _ in range(arrays)]
    errors = [drawn.uniform(2 / 3, 4 / 3) for _ in range(arrays)]
    estimated = [Load(f"array{n}", tuple(size / speed for speed in speeds)) for n, size in enumerate(sizes)]
    real = [
        Load(one.name, tuple(error * each for each in one.seconds if each is not None))
        for one, error in zip(estimated, errors, strict=True)
    ]
    begun, decisions, deciding = time.perf_counter(), 0, 0.0
    placement = Placement(estimated, kinds, 0, clock)
    deciding += time.perf_counter() - begun
    ends: list[tuple[float, int]] = []
    idle = placement.idle
    while True:
        for device in idle:
            begun = time.perf_counter()
            number = placement.begin(device)
            deciding += time.perf_counter() - begun
            decisions += 1
            if number is not None:
                heappush(ends, (clock.now + (real[number].seconds[kinds[device]] or 0.0), device))
        if not ends:
            break
        clock.now, device = heappop(ends)
        placement.end(device)
        idle = [device]
    return Placed(clock.now, lower_bound(real, kinds), deciding / decisions * 1e6)

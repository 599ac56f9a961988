"""Simulate plans of a cluster that are revised by measurements, against first plans and plans with perfect estimates.

In ``wrong`` cases tasks and devices take 0.3 to 3 times their estimated seconds; in ``right`` ones the estimates are
correct. Each move costs the seconds until an array has left, and those until it trains again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from hfusion.bench.placement_simulation import RealCluster, SimulatedRun, VirtualClock, loaded
from hfusion.cluster.longest_first import Load, lower_bound
from hfusion.cluster.placement import Placement

# Seconds until an array trains where it begins, until one has left, and between two messages of how far it is.
STARTUP, LEAVING, TOLD = 10.0, 2.0, 5.0


class Replanned(NamedTuple):
    """Seconds until all has ended, and CPU microseconds per message; ``moved``: arrays that went on elsewhere."""

    makespan: float
    lower_bound: float
    us_per_message: float
    moved: int


def replanned(arrays: int, devices: int, *, right: bool, seed: int) -> dict[str, Replanned]:
    """One case by each kind of plan: arrays of up to 8-fold lengths, of a task each four, on devices of one kind."""
    drawn = random.Random(seed)
    sizes = [1000.0 * drawn.uniform(0.25, 2.0) for _ in range(arrays)]
    tasks = [f"task{number // 4}" for number in range(arrays)]
    of_task = {task: _wrong(drawn, right=right) for task in dict.fromkeys(tasks)}
    slow = [_wrong(drawn, right=right) for _ in range(devices)]
    took = [[size * of_task[task] * cost for cost in slow] for size, task in zip(sizes, tasks, strict=True)]
    estimated = [loaded(number, [size], tasks[number]) for number, size in enumerate(sizes)]
    exact_loads = [loaded(number, cost, tasks[number]) for number, cost in enumerate(took)]
    bound = lower_bound(exact_loads, [*range(devices)])

    def run(loads: Sequence[Load], kinds: Sequence[int], report_interval: float | None) -> Replanned:
        clock = VirtualClock()
        placement = Placement(loads, kinds, 0, clock, range(arrays))
        simulation = SimulatedRun(placement, clock, RealCluster(took, STARTUP, LEAVING, report_interval))
        return Replanned(simulation.run(), bound, simulation.deciding / simulation.messages * 1e6, simulation.moved)

    return {
        "first plan": run(estimated, [0] * devices, None),
        "made anew": run(estimated, [0] * devices, TOLD),
        "rates known": run(exact_loads, range(devices), None),
    }


def _wrong(drawn: random.Random, *, right: bool) -> float:
    return 1.0 if right else math.exp(drawn.uniform(math.log(0.3), math.log(3.0)))

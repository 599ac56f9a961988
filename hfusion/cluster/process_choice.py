"""Choose one process for all devices of a machine or one per device, from the estimated time spent in Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hfusion.cluster.rates import DIFFERS
from hfusion.device.calibrate import Rates
from hfusion.device.native import cores
from hfusion.passes.cost.cost import symbol_sizes
from hfusion.passes.partition.cut_shards import shards_at
from hfusion.schedule.plan import Processes, TaskPlan, Unit
from hfusion.tasks.arrange import Arrangement
from hfusion.tasks.compile_choice import eager_reason

# How often the process of an array may be lost, see `Cluster`.
MAX_FAILURES = 3
# A rate per second so high that operator calls, FLOPs or bytes cost nothing.
_FREE = 1e30


@dataclass(frozen=True)
class ArraySeconds:
    """Estimated seconds of an array that has a device to itself.

    Attributes:
        python: seconds per minibatch that hold the interpreter lock: operator calls and the engine.
        computing: seconds per minibatch on the device.
        overlaps: whether the device computes while Python continues.
    """

    python: float
    computing: float
    minibatches: int
    overlaps: bool

    @staticmethod
    def of(one: Arrangement, plan: TaskPlan, rates: Rates) -> ArraySeconds:
        """Estimate the seconds of an array on a device with ``rates``, calls from Python included."""
        minibatch, cuts = one.minibatch(), [shard.first for shard in plan.shards[1:]]
        program = one.array.compiled(minibatch.arguments_for(one.array)).program
        sizes = symbol_sizes(program, minibatch.shapes)

        def step_seconds(rates: Rates) -> float:
            shards = shards_at(program, cuts, sizes, rates, one.optimizer.state_stacks)
            return replace(plan, shards=shards).step_seconds

        eager = eager_reason(one, plan)
        calls = 0.0 if not eager else step_seconds(replace(rates, flops=_FREE, memory=_FREE))
        units = [(count, Unit(plan.name, 0, *sort)) for sort, count in plan.counts.items()]
        actions = sum(count * len(plan.actions_of(unit).computes) for count, unit in units) / plan.steps
        computing = step_seconds(replace(rates, calls=_FREE))
        return ArraySeconds(calls + actions * rates.action_seconds, computing, plan.steps, rates.device != "cpu")

    @property
    def whole(self) -> float:
        """Seconds of all minibatches."""
        minibatch_seconds = max(self.python, self.computing) if self.overlaps else self.python + self.computing
        return self.minibatches * minibatch_seconds


def devices_at_once(devices: int, rates: Rates, threads: int) -> int:
    """Return how many devices compute at the same time: all accelerators, or as many CPU devices as have cores."""
    return devices if rates.device != "cpu" else max(1, min(devices, cores() // threads))


def choose_processes(arrays: Sequence[ArraySeconds], devices: int, at_once: int, startup: float) -> Processes:
    """Return the processes that end soonest, by estimates.

    In one process, all Python code shares one interpreter lock.

    Args:
        at_once: how many of the devices compute at the same time.
        startup: seconds that several processes need to start.
    """
    if len(arrays) == 1:
        return Processes(1, "one array trains on one device at a time")
    longest = max(arrays, key=lambda array: array.whole)
    shared = max(longest.whole, math.fsum(array.whole for array in arrays) / at_once)
    single = max(shared, math.fsum(array.minibatches * array.python for array in arrays))
    several = startup + shared
    reason = (
        f"a minibatch takes {1e3 * longest.python:.2g} ms of Python and {1e3 * longest.computing:.2g} ms of computing, "
        f"estimated are {single:.3g} s in one process and {several:.3g} s in {devices}, of which "
        f"{startup:.2g} s to begin"
    )
    return Processes(devices if several * (1 + DIFFERS) < single else 1, reason)

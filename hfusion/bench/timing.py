"""Interleaved timing: in every round each contender runs for a while, A B A B; ratios are taken per round.

Disturbances on a shared machine last longer than a round, so they affect all contenders of the round alike: a
ratio taken within rounds varies less than the ratio of two medians.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from hfusion.device.backend import backend

Times = Mapping[str, tuple[float, ...]]


@contextmanager
def collector_off() -> Iterator[None]:
    """No pauses of the garbage collector in the block."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def measure(step: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds per call of ``step`` over ``count`` calls, without pauses of the garbage collector."""
    with collector_off():
        return backend(device).seconds(lambda: [step() for _ in range(count)]) / count


def calibrate(step: Callable[[], object], slot: float, device: torch.device) -> int:
    """Return the number of calls of ``step`` that last at least ``slot`` seconds; also warms up."""
    count = 1
    while (seconds := measure(step, count, device)) * count < slot:
        count = max(count + 1, min(10 * count, math.ceil(1.1 * slot / max(seconds, 1e-9))))
    return count


def interleave(
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    slot: float,
    device: torch.device,
    tick: Callable[[], None],
) -> Times:
    """Seconds per step of every contender in every round; ``tick`` is called after each measured slot.

    Raises ValueError without a single round.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    counts = {name: calibrate(step, slot, device) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(measure(step, counts[name], device))
            tick()
    return {name: tuple(values) for name, values in seconds.items()}


def children_cpu_seconds() -> float:
    """Processor time of child processes that have ended, and of theirs. Needs POSIX."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def spread(values: Sequence[float]) -> float:
    """The distance of the quartiles over the median; 0.0 for a single value."""
    if len(values) < 2:
        return 0.0
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / middle


def speedup(baseline: Sequence[float], other: Sequence[float]) -> float:
    """Return the speedup of ``other`` over ``baseline``: the median of the ratios of each round."""
    return statistics.median(b / o for b, o in zip(baseline, other, strict=True))

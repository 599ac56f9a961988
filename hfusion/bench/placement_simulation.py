"""Simulated placement of arrays on the devices of a cluster: the cost of a message, and the makespan over its bound.

An array takes up to a third more or less time than estimated, so that devices take arrays from one another at the end.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from hfusion.cluster.longest_first import Load, lower_bound
from hfusion.cluster.placement import Placement

_STEPS = 1000


class Placed(NamedTuple):
    """The result of a placement. ``lower_bound``: computed from the real times of the arrays."""

    makespan: float
    lower_bound: float
    us_per_message: float


class VirtualClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class RealCluster:
    """The real times of arrays: ``seconds[array][device]``.

    ``startup``: seconds until an array trains, on each device on which it begins; ``leaving``: seconds from the request
    to leave a device until it has left. ``progress_interval``: seconds between two progress messages of an array, None
    without them.
    """

    seconds: Sequence[Sequence[float]]
    startup: float = 0.0
    leaving: float = 0.0
    progress_interval: float | None = None


@dataclass(eq=False)
class _Visitor:
    """An array on a device: from ``first`` of its minibatches, at ``start_time``."""

    number: int
    start_time: float
    first: float


class SimulatedRun:
    """A placement at work. ``moved``: how many arrays have gone on elsewhere; ``deciding``: seconds of CPU."""

    def __init__(self, placement: Placement, clock: VirtualClock, real: RealCluster) -> None:
        self._placement, self._clock, self._real = placement, clock, real
        self._steps = [0.0] * len(real.seconds)
        self._visitors: dict[int, _Visitor] = {}
        self._events: list[tuple[float, int, str, int, _Visitor]] = []
        self.done: list[int] = []
        self.moved, self.messages, self.deciding = 0, 0, 0.0
        # Events at one time come in the order in which they were made.
        self._event_count = 0

    def run(self) -> float:
        """Seconds until all has ended."""
        while True:
            for device in self._decide(self._placement.moves):
                self._add_event(self._clock.now + self._real.leaving, device, "left")
            for device in self._decide(self._placement.to_ask):
                number = self._decide(self._placement.start_next, device)
                if number is not None:
                    self._start_array(device, number)
            if not self._events:
                return self._clock.now
            now, _, event, device, run = heappop(self._events)
            # Nothing else comes of what has left or ended.
            if self._visitors.get(device) is run:
                self._clock.now = now
                self.messages += 1
                self._hear(event, device, run)

    def _decide(self, ask: Any, *args: Any) -> Any:
        begun = time.process_time()
        decision = ask(*args)
        self.deciding += time.process_time() - begun
        return decision

    def _add_event(self, at: float, device: int, event: str) -> None:
        self._event_count += 1
        heappush(self._events, (at, self._event_count, event, device, self._visitors[device]))

    def _start_array(self, device: int, number: int) -> None:
        run = self._visitors[device] = _Visitor(number, self._clock.now + self._real.startup, self._steps[number])
        remaining = 1 - run.first / _STEPS
        self._add_event(run.start_time + remaining * self._real.seconds[number][device], device, "end")
        if self._real.progress_interval is not None:
            self._add_event(run.start_time, device, "progress")

    def _hear(self, event: str, device: int, run: _Visitor) -> None:
        if event == "end":
            self.done.append(self._placement.end(device))
            del self._visitors[device]
            return
        step_seconds = self._real.seconds[run.number][device] / _STEPS
        steps = min(_STEPS - 1.0, run.first + max(0.0, self._clock.now - run.start_time) / step_seconds)
        self._decide(
            self._placement.reach, device, int(steps), run.start_time + (int(steps) - run.first) * step_seconds
        )
        if event == "progress" and self._real.progress_interval is not None:
            self._add_event(self._clock.now + self._real.progress_interval, device, "progress")
        elif event == "left":
            self._steps[run.number] = int(steps)
            self._placement.queue_moved_array(device)
            del self._visitors[device]
            self.moved += 1


def placed(arrays: int, devices: int, *, alike: bool, seed: int = 0) -> Placed:
    """One run; ``alike``: all devices are of one speed and all arrays of one length, else of three, up to 8-fold."""
    drawn, clock = random.Random(seed), VirtualClock()
    speeds = (1.0,) if alike else (1.0, 2.0, 4.0)
    kinds = [drawn.randrange(len(speeds)) for _ in range(devices)]
    sizes = [1000.0 if alike else 1000.0 * drawn.uniform(0.25, 2.0) for _ in range(arrays)]
    errors = [drawn.uniform(2 / 3, 4 / 3) for _ in range(arrays)]
    estimated = [loaded(number, [size / speed for speed in speeds]) for number, size in enumerate(sizes)]
    took = [[error * size / speed for speed in speeds] for error, size in zip(errors, sizes, strict=True)]
    begun = time.process_time()
    placement = Placement(estimated, kinds, 0, clock, range(arrays))
    placing = time.process_time() - begun
    # Each array is heard of twice at least.
    real = RealCluster([[seconds[kind] for kind in kinds] for seconds in took], progress_interval=100.0)
    run = SimulatedRun(placement, clock, real)
    makespan = run.run()
    bound = lower_bound([loaded(number, seconds) for number, seconds in enumerate(took)], kinds)
    return Placed(makespan, bound, (placing + run.deciding) / run.messages * 1e6)


def loaded(number: int, seconds: Sequence[float], task: str | None = None) -> Load:
    """Return the load of an independent array, or of one array of a task."""
    return Load(f"array{number}", tuple(seconds), task or f"task{number}", _STEPS)

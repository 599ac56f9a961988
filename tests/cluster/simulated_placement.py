"""Arrays placed on simulated devices of a cluster, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from hfusion.cluster.longest_first import Load
from hfusion.cluster.placement import Placement

_STEPS = 1000


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
    """A placement at work. ``moved``: how many arrays have gone on elsewhere."""

    def __init__(self, placement: Placement, clock: VirtualClock, real: RealCluster) -> None:
        self._placement, self._clock, self._real = placement, clock, real
        self._steps = [0.0] * len(real.seconds)
        self._visitors: dict[int, _Visitor] = {}
        self._events: list[tuple[float, int, str, int, _Visitor]] = []
        self.done: list[int] = []
        self.moved = 0
        # Events at one time come in the order in which they were made.
        self._event_count = 0

    def run(self) -> float:
        """Seconds until all has ended."""
        while True:
            for device in self._placement.moves():
                self._add_event(self._clock.now + self._real.leaving, device, "left")
            for device in self._placement.to_ask():
                number = self._placement.start_next(device)
                if number is not None:
                    self._start_array(device, number)
            if not self._events:
                return self._clock.now
            now, _, event, device, run = heappop(self._events)
            # Nothing else comes of what has left or ended.
            if self._visitors.get(device) is run:
                self._clock.now = now
                self._hear(event, device, run)

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
        self._placement.reach(device, int(steps), run.start_time + (int(steps) - run.first) * step_seconds)
        if event == "progress" and self._real.progress_interval is not None:
            self._add_event(self._clock.now + self._real.progress_interval, device, "progress")
        elif event == "left":
            self._steps[run.number] = int(steps)
            self._placement.queue_moved_array(device)
            del self._visitors[device]
            self.moved += 1


def loaded(number: int, seconds: Sequence[float], task: str | None = None) -> Load:
    """Return the load of an independent array, or of one array of a task."""
    return Load(f"array{number}", tuple(seconds), task or f"task{number}", _STEPS)

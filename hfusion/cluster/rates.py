"""Measured speeds of arrays on devices, which correct the estimates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

# Rates that differ by less are the same: as much lies between two runs of one thing where other programs run beside it.
DIFFERS = 0.1
# Seconds: a rate is that of the last one or two windows, so that a device that has become slow is seen to be.
_WINDOW = 30.0
# Minibatches that make a rate: one may have been an odd one.
_LEAST = 3
# Of fitting; each halves what is left to explain.
_ROUNDS = 8


@dataclass(eq=False)
class ArrayProgress:
    """Progress of an array on its device: ``steps`` minibatches at time ``at`` of the device's clock."""

    steps: int
    at: float

    def __post_init__(self) -> None:
        self._since = self._middle = (self.steps, self.at)

    def reach(self, steps: int, at: float) -> None:
        """It is further."""
        self.steps, self.at = steps, at
        if at - self._middle[1] >= _WINDOW and steps - self._middle[0] >= _LEAST:
            self._since, self._middle = self._middle, (steps, at)

    @property
    def seconds(self) -> float | None:
        """Of a minibatch, of late; None as long as too few were told."""
        steps, at = self._since
        return (self.at - at) / (self.steps - steps) if self.steps - steps >= _LEAST and self.at > at else None


class Ratios:
    """Measured over estimated time of arrays: a factor of the device times one of the task.

    A ratio that is measured is explained by the devices and tasks of all that was measured, in equal parts as long as
    nothing else tells which of both it is: the least squares of the logarithms that lie nearest to the estimates.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self._tasks = tasks
        self._of_device: dict[int, float] = defaultdict(float)
        # The same as factors, in steps.
        self._speeds: dict[int, float] = {}
        self._of_task: dict[str, float] = defaultdict(float)
        self._on_device: dict[int, dict[str, float]] = defaultdict(dict)
        self._on_task: dict[str, dict[int, float]] = defaultdict(dict)
        # The sums of what is measured of each task, less what its devices explain: it may be on thousands of these.
        self._left_to_tasks: dict[str, float] = defaultdict(float)
        self._measured: dict[tuple[int, int], float] = {}
        self._latest: dict[int, int] = {}

    def note(self, number: int, device: int, ratio: float) -> bool:
        """An array takes ``ratio`` times what was estimated on a device; whether that is news."""
        value, before = math.log(ratio), self._measured.get((number, device))
        if before is not None and abs(value - before) < math.log1p(DIFFERS):
            return False
        news = abs(value - math.log(self.factor(number, device))) >= math.log1p(DIFFERS)
        self._measured[number, device], self._latest[number] = value, device
        task = self._tasks[number]
        counted = self._on_task[task].get(device, self._of_device[device])
        self._left_to_tasks[task] += value - counted
        self._on_device[device][task] = self._on_task[task][device] = value
        self._fit(device, task)
        return news

    def _fit(self, device: int, task: str) -> None:
        """Only this device and this task: the others have their turn when they are measured."""
        on_device, count, began = self._on_device[device], len(self._on_task[task]), self._of_device[device]
        for _ in range(_ROUNDS):
            here = sum(value - self._of_task[name] for name, value in on_device.items()) / len(on_device)
            there = (self._left_to_tasks[task] + began - self._of_device[device]) / count
            self._of_device[device] += (here - self._of_device[device]) / 2
            self._of_task[task] += (there - self._of_task[task]) / 2
        for name in on_device:
            self._left_to_tasks[name] += began - self._of_device[device]
        step = math.log1p(DIFFERS)
        self._speeds[device] = math.exp(round(self._of_device[device] / step) * step)

    def factor(self, number: int, device: int) -> float:
        """Return the ratio of actual to estimated time of an array on a device, measured or predicted."""
        measured = self._measured.get((number, device))
        return self.of_array(number) * self.of_device(device) if measured is None else math.exp(measured)

    def of_array(self, number: int) -> float:
        """Of an array, on a device that takes what was estimated."""
        device = self._latest.get(number)
        if device is None:
            return math.exp(self._of_task[self._tasks[number]])
        return math.exp(self._measured[number, device]) / self.of_device(device)

    def forget(self, number: int) -> None:
        """An array and its task are no more; what they told of devices stays as long as nothing else tells of these."""
        task = self._tasks[number]
        for device in self._on_task.pop(task, {}):
            del self._on_device[device][task]
            self._measured.pop((number, device), None)
        self._of_task.pop(task, None)
        self._left_to_tasks.pop(task, None)
        self._latest.pop(number, None)

    def of_device(self, device: int) -> float:
        """Of a device, in steps of what differs, so that devices that are alike are so here."""
        return self._speeds.get(device, 1.0)

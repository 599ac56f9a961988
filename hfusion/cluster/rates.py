"""Measured speeds of arrays on devices, which correct the estimates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

# Smaller relative differences are ignored: repeated runs differ as much on a machine that runs other programs.
DIFFERS = 0.1
# Iterations of the fit; each halves the remaining error.
_ROUNDS = 8


class Ratios:
    """Ratios of measured to estimated time of arrays, as the product of a factor of the device and one of the task.

    The logarithms of the factors are a least-squares fit to all measurements, the solution nearest to 0. So a ratio
    counts half for the device and half for the task, until other measurements distinguish the two.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self._tasks = tasks
        self._of_device: dict[int, float] = defaultdict(float)
        # The same as factors, rounded to steps of DIFFERS.
        self._speeds: dict[int, float] = {}
        self._of_task: dict[str, float] = defaultdict(float)
        self._on_device: dict[int, dict[str, float]] = defaultdict(dict)
        self._on_task: dict[str, dict[int, float]] = defaultdict(dict)
        # For each task, the sum of its log ratios less its devices' log factors; updated as devices may be many.
        self._left_to_tasks: dict[str, float] = defaultdict(float)
        self._measured: dict[tuple[int, int], float] = {}
        self._latest: dict[int, int] = {}

    def note(self, number: int, device: int, ratio: float) -> bool:
        """Record that an array takes ``ratio`` times its estimate on a device. Return whether that is a surprise."""
        value, previous = math.log(ratio), self._measured.get((number, device))
        if previous is not None and abs(value - previous) < math.log1p(DIFFERS):
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
        """Fit the factors of this device and this task only. The others are fitted at their own measurements."""
        on_device, count, old_factor = self._on_device[device], len(self._on_task[task]), self._of_device[device]
        for _ in range(_ROUNDS):
            device_target = sum(value - self._of_task[name] for name, value in on_device.items()) / len(on_device)
            task_target = (self._left_to_tasks[task] + old_factor - self._of_device[device]) / count
            self._of_device[device] += (device_target - self._of_device[device]) / 2
            self._of_task[task] += (task_target - self._of_task[task]) / 2
        for name in on_device:
            self._left_to_tasks[name] += old_factor - self._of_device[device]
        step = math.log1p(DIFFERS)
        self._speeds[device] = math.exp(round(self._of_device[device] / step) * step)

    def factor(self, number: int, device: int) -> float:
        """Return the ratio of actual to estimated time of an array on a device, measured or predicted."""
        measured = self._measured.get((number, device))
        return self.of_array(number) * self.of_device(device) if measured is None else math.exp(measured)

    def of_array(self, number: int) -> float:
        """Return the ratio of an array on a device with factor 1."""
        device = self._latest.get(number)
        if device is None:
            return math.exp(self._of_task[self._tasks[number]])
        return math.exp(self._measured[number, device]) / self.of_device(device)

    def forget(self, number: int) -> None:
        """Drop the measurements of an array and its task. Device factors change only with later measurements."""
        task = self._tasks[number]
        for device in self._on_task.pop(task, {}):
            del self._on_device[device][task]
            self._measured.pop((number, device), None)
        self._of_task.pop(task, None)
        self._left_to_tasks.pop(task, None)
        self._latest.pop(number, None)

    def of_device(self, device: int) -> float:
        """Return the factor of a device, rounded so that similar devices have equal factors."""
        return self._speeds.get(device, 1.0)

"""Epoch times of arrays on the devices of a sweep: estimates, corrected by measurements."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low

from hfusion.cluster.messages import DeviceInfo
from hfusion.cluster.rates import Ratios
from hfusion.tune.epoch_result import EpochResult
from hfusion.tune.shape_array import Shape, ShapeArray

# Epochs per ratio: their median ignores one outlier.
_LATE = 3


class EpochSeconds:
    """Seconds of the minibatches of arrays, evaluation included.

    A ratio measured for a shape on a device is used there for any number of rows; see `Ratios` for other devices.
    """

    def __init__(self, devices: Sequence[DeviceInfo]) -> None:
        self._devices = devices
        # Names of shapes, in the order in which they occur. `Ratios` reads this list.
        self._names: list[str] = []
        self._ratios = Ratios(self._names)
        self._numbers: dict[Shape, int] = {}
        # Recent ratios, by array and device.
        self._late: dict[tuple[str, int], deque[float]] = {}
        self._startup: dict[Shape, float] = {}
        self._handover = 0.0
        self.steps = 0

    def _number(self, shape: Shape) -> int:
        if shape not in self._numbers:
            self._numbers[shape] = len(self._names)
            self._names.append(f"shape {len(self._names)}")
        return self._numbers[shape]

    def _estimated(self, array: ShapeArray, device: int, rows: int) -> float:
        footprint = array.shape.footprint(self._devices[device])
        return rows * footprint.seconds(1) if array.plain else footprint.seconds(rows)

    def note(self, array: ShapeArray, result: EpochResult) -> None:
        """Record the time of an epoch that an array has trained on its device."""
        estimated = self._estimated(array, array.device, array.width)
        # Rounded, so that floating-point errors do not decide between equally fast devices.
        ratio = round(result.seconds / result.steps / estimated, 9)
        recent = self._late.setdefault((array.name, array.device), deque(maxlen=_LATE))
        recent.append(ratio)
        self._ratios.note(self._number(array.shape), array.device, median_low(recent))
        self._startup[array.shape] = max(self._startup.get(array.shape, 0.0), result.startup)
        self.steps = max(1, result.steps // array.shape.minibatches)

    def of(self, array: ShapeArray, device: int, more: int = 0) -> float:
        """Return the seconds of a minibatch with ``more`` members; of an epoch if shapes differ in its length."""
        factor = self._ratios.factor(self._number(array.shape), device)
        return self._estimated(array, device, array.least(more)) * factor * array.shape.minibatches

    def spread(self, array: ShapeArray) -> float | None:
        """Return the longest of an array's last epochs over the shortest; None for fewer than two."""
        recent = self._late.get((array.name, array.device), ())
        return max(recent) / min(recent) if len(recent) > 1 else None

    def note_move(self, seconds: float) -> None:
        """Record how long a migration of arrays took."""
        self._handover = max(self._handover, seconds)

    def to_move(self, shape: Shape) -> float:
        """Return the estimated seconds of a move: the longest measured one, and the longest startup of the shape."""
        return self._handover + self._startup.get(shape, 0.0)

    def keep(self, arrays: Sequence[ShapeArray]) -> None:
        """Forget measurements of other arrays than these. Speeds of devices are kept until they are measured again."""
        for shape in self._numbers.keys() - {array.shape for array in arrays}:
            self._ratios.forget(self._numbers.pop(shape))
            self._startup.pop(shape, None)
        live_keys = {(array.name, array.device) for array in arrays}
        self._late = {key: recent for key, recent in self._late.items() if key in live_keys}

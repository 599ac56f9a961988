"""Which device takes which trial of a sweep: by the rows that pay there, and in bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hfusion.cluster.drive import DeviceLost
from hfusion.core.errors import PlanError
from hfusion.tune.footprint import fits
from hfusion.tune.shape_array import Shape, ShapeArray
from hfusion.tune.space import TrialModel
from hfusion.tune.workers import SweepWorkers


class Rooms:
    """The arrays of a sweep on its devices, at most one of a shape on each.

    Args:
        trials: the most that an array could have.
        rows: the most at once on all devices; None: as many as make members cheaper.
        together: all trials of a shape are one array.
    """

    def __init__(self, workers: SweepWorkers, trials: int, rows: int | None, *, together: bool) -> None:
        self.arrays: list[ShapeArray] = []
        self.opened = 0
        self._workers, self._trials, self._rows, self._together = workers, trials, rows, together

    def check(self, shape: Shape, what: str) -> None:
        """Raise PlanError where no device has memory for one trial of a shape."""
        there = max(self._workers.devices, key=lambda one: one.budget)
        footprint = shape.footprint(there)
        if not fits(there.budget, [(footprint, 1)]):
            need = footprint.held(1) + footprint.passing(1)
            raise PlanError(
                f"{what} needs {need:,} bytes to be trained, and device {there.name} has {there.budget:,}: bound the "
                "space, give a smaller minibatch, or let such trials fail with catch=(hf.PlanError,)"
            )

    def join(self, array: ShapeArray, candidate: TrialModel) -> None:
        """Let a trial wait for its row in an array that `room_for` gave."""
        array.joining.append(candidate)
        if array not in self.arrays:
            self._open(array)

    def _open(self, array: ShapeArray) -> None:
        self.opened += 1
        self.arrays.append(array)
        self._workers.open(array.name, array.device, array.shape.first.suggestion.options)

    def restored(self, name: str, shape: Shape) -> ShapeArray:
        """An array of before, on the device that has least to do now."""
        devices = range(len(self._workers.devices))
        array = ShapeArray(name, shape, min(devices, key=lambda each: (self._busy(each, shape), each)))
        opened = self.opened
        self._open(array)
        self.opened = opened
        return array

    def give_back(self) -> None:
        """Free rows, and arrays that nobody is in, give back what they take."""
        crowded = {array.device for array in self.arrays if self.crowded(array.device)}
        for array in self.arrays:
            if array.seats and array.compacts():
                self._workers.send(array.name, "compact")
            elif not array.taken:
                self._workers.drop(array.name, collect=array.device in crowded)
        self.arrays = [array for array in self.arrays if array.taken]

    def _on(self, device: int) -> list[ShapeArray]:
        return [array for array in self.arrays if array.device == device]

    def crowded(self, device: int) -> bool:
        """Whether arrays need more than half of a device.

        Members that left, arrays and programs hold one another, and so their memory, until Python looks for such
        cycles. To make it look takes a fifth of a second, and can wait where there is room.
        """
        return not self._fits(device, self._on(device), part=0.5)

    def _fits(self, device: int, arrays: Iterable[ShapeArray], more: ShapeArray | None = None, part: float = 1) -> bool:
        """Whether arrays, one of them with a member more, fit a part of a device."""
        there = self._workers.devices[device]
        sizes = [(one.shape.footprint(there), one.rows(1 if one is more else 0)) for one in arrays]
        return fits(int(there.budget * part), sizes)

    @property
    def full(self) -> bool:
        """Whether there are as many rows as may be at once, whatever shape comes next."""
        return self._rows is not None and sum(one.taken for one in self.arrays) >= self._rows

    def room_for(self, shape: Shape) -> ShapeArray | None:
        """The array that one more trial may join, on the device that has least to do: by rows at once, and in bytes."""
        if self.full:
            return None
        own = [array for array in self.arrays if array.shape is shape]
        there = {array.device: array for array in own}
        devices: Collection[int] = range(len(self._workers.devices))
        if own and self._together:
            # Its trials are compared with one another, and copied.
            devices = list(there)
        busy = {device: self._busy(device, shape) for device in devices if device not in self._workers.gone}
        for device in sorted(busy, key=lambda each: (busy[each], each)):
            array = there.get(device) or ShapeArray(f"array-{self.opened}", shape, device)
            if self._has_room(array, busy[device]):
                return array
        return None

    def _busy(self, device: int, shape: Shape) -> float:
        """The part of a device that arrays fill, with one more of a shape; 1 is all that makes members cheaper."""
        most, there = self._trials, self._workers.devices[device]
        own = sum(array.taken / array.shape.fastest(there, most) for array in self._on(device))
        return own + 1 / shape.fastest(there, most)

    def _has_room(self, array: ShapeArray, busy: float) -> bool:
        """Whether a device has room for one more member of an array."""
        if not any(one.taken for one in self._on(array.device)):
            if array not in self.arrays:
                self.give_back()
            return self._fits(array.device, [array], array)
        if self._rows is None and busy > 1:
            return False
        for _ in range(2):
            others = [one for one in self._on(array.device) if one is not array]
            if self._fits(array.device, [array, *others], array):
                return True
            self.give_back()
            if array not in self.arrays:
                # Nobody was in it.
                array.widths, array.width = None, 0
        return False

    def moved(self, name: str, gone: Collection[int]) -> int:
        """The device that takes over an array. Raises DeviceLost where none has room for it."""
        array = next(one for one in self.arrays if one.name == name)
        left = [device for device in range(len(self._workers.devices)) if device not in gone]
        for device in sorted(left, key=lambda each: (len(self._on(each)), each)):
            if self._fits(device, [array, *self._on(device)]):
                array.device = device
                return device
        raise DeviceLost(
            f"{len(gone)} of {len(self._workers.devices)} devices are lost, and no other has room for the "
            f"{len(array.seats)} trials of {name}: with a directory the same call goes on when there are more"
        )

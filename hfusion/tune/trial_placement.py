"""Placement of trials on devices, by the estimated seconds and bytes of their arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from hfusion.capture.registered_tensors import tensors
from hfusion.cluster.messages import DeviceLost
from hfusion.core.errors import PlanError
from hfusion.tune.footprint import fits
from hfusion.tune.shape_array import Shape, ShapeArray, TrialSlot
from hfusion.tune.space import TrialModel
from hfusion.tune.sweep_workers import SweepWorkers
from hfusion.tune.training_setup import EpochResult


class TrialPlacement:
    """The arrays of a sweep on its devices, at most one of a shape on each.

    Args:
        trials: the maximum number of trials in an array.
        concurrent: returns the maximum number of concurrent trials on all devices.
        fixed: train that many at a time, even if fewer would take less time per trial.
        together: keep all trials of a shape in one array.
    """

    def __init__(
        self, workers: SweepWorkers, trials: int, concurrent: Callable[[], int], *, fixed: bool, together: bool
    ) -> None:
        self.arrays: list[ShapeArray] = []
        self.opened = 0
        self._workers, self._trials, self._concurrent = workers, trials, concurrent
        self._fixed, self._together = fixed, together

    def check(self, shape: Shape, what: str) -> None:
        """Raise PlanError if no device has memory for one trial of a shape. ``what``: the trial, in the message."""
        device = max(self._workers.devices, key=lambda info: info.budget)
        footprint, loops = shape.footprint(device), not shape.is_array
        if not fits(device.budget, [(footprint, 1, loops)]):
            need = footprint.held(1) + footprint.passing(1, loops=loops)
            raise PlanError(
                f"{what} needs {need:,} bytes to be trained, and device {device.name} has {device.budget:,}: bound the "
                "space, give a smaller minibatch, or let such trials fail with catch=(hf.PlanError,)"
            )

    def join(self, array: ShapeArray, candidate: TrialModel) -> None:
        """Let a trial wait for a row in an array that `room_for` returned."""
        array.joining.append(candidate)
        if array not in self.arrays:
            self.opened += 1
            self.arrays.append(array)

    def open(self, array: ShapeArray) -> None:
        """Choose whether waiting trials become an array or stay plain, and create it in a worker."""
        array.plain = self._is_plain(array, array.joining, [member.suggestion.epochs for member in array.joining])
        self._workers.open(array.name, array.device, array.shape.first.suggestion.choices, array.plain)

    def _is_plain(self, array: ShapeArray, members: Sequence[TrialModel], epochs: Sequence[int]) -> bool:
        """Return whether trials with these remaining epochs run in plain torch; never if they share tensors."""
        ids = [identity for member in members for identity in {id(tensor) for _, tensor in tensors(member.model)}]
        device = self._workers.devices[array.device]
        if len(set(ids)) < len(ids):
            return False
        fits = lambda: self._fits(array.device, self._on(array.device))  # noqa: E731
        return array.shape.stay_plain(epochs, device, self._workers.side_by_side, fits)

    def promoted(self) -> list[tuple[str, ShapeArray]]:
        """Turn plain trials into arrays where measured times favour it. Return each array after its old name."""
        promoted = []
        for array in self.arrays:
            if array.plain and array.slots and not array.joining and self._rests(array):
                epochs = [slot.suggestion.epochs - slot.epochs for slot in array.slots.values()]
                if not self._is_plain(array, (), epochs):
                    promoted.append((array.name, array))
                    array.promote(f"array-{self.opened}")
                    self.opened += 1
        return promoted

    def note(self, array: ShapeArray, result: EpochResult) -> None:
        """Record the seconds of a minibatch of plain trials, by which arrays are chosen."""
        if array.plain:
            array.shape.plain_seconds = result.seconds / result.steps / max(1, len(result.values))

    def restored(self, name: str, shape: Shape, slots: Sequence[TrialSlot], *, plain: bool) -> ShapeArray:
        """Place a saved array on the device whose round ends first, among those with memory for it if there are any."""
        arrays = [ShapeArray(name, shape, device) for device in self._live_devices]
        for array in arrays:
            array.slots, array.plain = {slot.tag: slot for slot in slots}, plain
        order = sorted(arrays, key=lambda option: self._end(option.device, option))
        chosen = next(
            (array for array in order if self._fits(array.device, [array, *self._on(array.device)])), order[0]
        )
        shape.is_array = shape.is_array or not plain
        self.arrays.append(chosen)
        self._workers.open(name, chosen.device, shape.first.suggestion.choices, plain)
        return chosen

    def give_back(self) -> None:
        """Drop arrays without trials, and release free rows."""
        crowded = {array.device for array in self.arrays if self.crowded(array.device)}
        for array in self.arrays:
            if not array.trial_count:
                self._workers.drop(array.name, collect=array.device in crowded)
            elif array.slots and self._rests(array) and array.widths is not None and array.least() < array.width:
                array.width, array.save = array.least(), ""
                self._workers.send(array.name, "compact")
        self.arrays = [array for array in self.arrays if array.trial_count]

    def _rests(self, array: ShapeArray) -> bool:
        """Return whether trials may join and leave an array: neither it nor its device is training."""
        return not array.training and array.device not in self._workers.busy

    def _on(self, device: int) -> list[ShapeArray]:
        return [array for array in self.arrays if array.device == device]

    def crowded(self, device: int) -> bool:
        """Return whether arrays need more than half of a device.

        Members that left, arrays and programs form reference cycles, which hold memory until Python collects garbage.
        A collection takes a fifth of a second, so it is only requested when memory is short.
        """
        return not self._fits(device, self._on(device), part=0.5)

    def _fits(self, device: int, arrays: Iterable[ShapeArray], more: ShapeArray | None = None, part: float = 1) -> bool:
        """Return whether arrays, with one more member in ``more``, fit into a ``part`` of a device's memory budget."""
        info = self._workers.devices[device]
        sizes = [
            (array.shape.footprint(info), array.rows(1 if array is more else 0), not array.shape.is_array)
            for array in arrays
        ]
        return fits(int(info.budget * part), sizes)

    @property
    def full(self) -> bool:
        """Return whether the maximum number of trials is training."""
        return sum(array.trial_count for array in self.arrays) >= self._concurrent()

    @property
    def _live_devices(self) -> list[int]:
        """The devices that are not lost."""
        return [device for device in range(len(self._workers.devices)) if device not in self._workers.lost_devices]

    def room_for(self, shape: Shape) -> ShapeArray | None:
        """Return the array for one more trial, on the device with memory whose round then ends first; or None."""
        if self.full or not self._pays(shape):
            return None
        shape_arrays = [array for array in self.arrays if array.shape is shape]
        choices = [array for array in shape_arrays if self._rests(array)]
        if not shape_arrays or not self._together:
            # With ``together``, trials are compared and copied, so all of a shape must be in one array.
            occupied = {array.device for array in shape_arrays} | set(self._workers.busy)
            new = [device for device in self._live_devices if device not in occupied]
            choices += [ShapeArray(f"array-{self.opened}", shape, device) for device in new]
        for array in sorted(choices, key=lambda choice: (self._end(choice.device, choice, 1), choice.device)):
            if self._has_room(array):
                return array
        return None

    def _pays(self, shape: Shape) -> bool:
        """Return whether one more trial lowers the time per trial, by estimates, so that a resumed sweep agrees."""
        if self._fixed:
            return True
        counts = Counter({shape: 1})
        for array in self.arrays:
            counts[array.shape] += array.trial_count
        devices = [self._workers.devices[device] for device in self._live_devices]
        most = {group: sum(group.fastest(device, self._trials) for device in devices) for group in counts}
        return sum(Fraction(count, most[group]) for group, count in counts.items()) <= 1

    def _end(self, device: int, array: ShapeArray | None = None, more: int = 0) -> float:
        """Return the summed seconds per minibatch of a device's arrays, including ``array`` with ``more`` members."""
        arrays = self._on(device)
        if array is not None and array not in arrays:
            arrays.append(array)
        return sum(self._seconds(placed, device, more if placed is array else 0) for placed in arrays)

    def _seconds(self, array: ShapeArray, device: int, more: int = 0) -> float:
        """Return the estimated seconds of a minibatch with ``more`` members; of an epoch if shapes differ in that."""
        footprint, rows = array.shape.footprint(self._workers.devices[device]), array.least(more)
        seconds = rows * footprint.seconds(1) if array.plain else footprint.seconds(rows)
        return seconds * array.shape.minibatches

    def _has_room(self, array: ShapeArray) -> bool:
        """Return whether a device has memory for one more member of an array, without those that have no trials."""
        for _ in range(2):
            others = [placed for placed in self._on(array.device) if placed is not array]
            if self._fits(array.device, [array, *others], array):
                return True
            self.give_back()
            if array not in self.arrays:
                # It had no trials, and was dropped.
                array.widths, array.width = None, 0
        return False

    def moved(self, name: str) -> int:
        """Move an array of a lost device, and return its new device. Raises DeviceLost if none has room for it."""
        array = next(candidate for candidate in self.arrays if candidate.name == name)
        for device in sorted(self._live_devices, key=lambda index: (self._end(index, array), index)):
            if self._fits(device, [array, *self._on(device)]):
                array.device = device
                return device
        devices = self._workers.devices
        raise DeviceLost(
            f"{len(devices) - len(self._live_devices)} of {len(devices)} devices are lost, and no other has room for "
            f"the {len(array.slots)} trials of {name}: with a directory the same call goes on when there are more"
        )

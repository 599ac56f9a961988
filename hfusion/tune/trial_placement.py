"""Placement of trials on devices, by the estimated seconds and bytes of their arrays."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from fractions import Fraction
from heapq import nlargest
from statistics import median_low

from hfusion.capture.registered_tensors import tensors
from hfusion.cluster.messages import DeviceInfo, DeviceLost
from hfusion.cluster.rates import DIFFERS, Ratios
from hfusion.core.errors import PlanError
from hfusion.tune.array_costs import ArrayCosts
from hfusion.tune.epoch_result import EpochResult
from hfusion.tune.plain_trial_footprint import fits
from hfusion.tune.shape_array import Shape, ShapeArray, TrialSlot
from hfusion.tune.space import TrialModel
from hfusion.tune.sweep_workers import SweepWorkers


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
        self.seconds = EpochSeconds(workers.devices)
        self.costs = ArrayCosts(workers.devices[0].physical)

    def check(self, shape: Shape, what: str) -> None:
        """Raise PlanError if no device has memory for one trial of a shape. ``what``: the trial, in the message."""
        device = max(self._workers.devices, key=lambda info: info.budget)
        footprint = shape.footprint(device)
        if not fits(device.budget, [(footprint, 1)]):
            need = footprint.held(1) + footprint.passing(1)
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
        shared = len(set(ids)) < len(ids)
        choice = None if shared else array.shape.choice(epochs, device, self.costs, self._workers.side_by_side)
        return array.shape.choose_form(choice, lambda: self._fits(array.device, self._on(array.device)))

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
        """Record the result of an epoch of an array."""
        self.seconds.note(array, result)
        array.shape.note(array, result, self._workers.devices[array.device], self.costs)

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
            elif array.slots and self._rests(array) and array.compacts():
                array.save = ""
                self._workers.send(array.name, "compact")
        self.arrays = [array for array in self.arrays if array.trial_count]
        self.seconds.keep(self.arrays)

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
        sizes = [(array.shape.footprint(info), array.rows(1 if array is more else 0)) for array in arrays]
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
        return sum(self.seconds.of(placed, device, more if placed is array else 0) for placed in arrays)

    def _has_room(self, array: ShapeArray) -> bool:
        """Return whether a device has memory for one more member of an array."""
        if not any(placed.trial_count for placed in self._on(array.device)):
            if array not in self.arrays:
                self.give_back()
            return self._fits(array.device, [array], array)
        for _ in range(2):
            others = [placed for placed in self._on(array.device) if placed is not array]
            if self._fits(array.device, [array, *others], array):
                return True
            self.give_back()
            if array not in self.arrays:
                # It had no trials, and was dropped.
                array.widths, array.width = None, 0
        return False

    def moves(self, left: Callable[[ShapeArray], int]) -> dict[str, int]:
        """Return the new devices of arrays that should move, by measured times. Each array moves at most once.

        An array moves if this shortens the longest round by more than measurement noise, and saves more time than it
        costs. ``left``: returns the remaining epochs of an array.
        """
        targets: dict[str, int] = {}
        while (move := self._move(targets, left)) is not None:
            array, target = move
            targets[array.name] = array.device = target
        return targets

    def _move(self, moved: Collection[str], remaining: Callable[[ShapeArray], int]) -> tuple[ShapeArray, int] | None:
        """Return an array to move from the slowest device, and its target. Arrays named in ``moved`` stay."""
        ends = {device: self._end(device) for device in self._live_devices}
        source = max(ends, key=ends.__getitem__)
        last = nlargest(3, ends, key=ends.__getitem__)
        candidates: list[tuple[float, int, ShapeArray]] = []
        for array in self._on(source):
            spread = self.seconds.spread(array)
            if array.name in moved or spread is None:
                continue
            rest = ends[source] - self.seconds.of(array, source)
            for target in ends.keys() - {source}:
                others = max((ends[other] for other in last if other not in (source, target)), default=0.0)
                end = max(rest, others, ends[target] + self.seconds.of(array, target))
                saved = (ends[source] - end) * self.seconds.steps * remaining(array)
                if end * max(1 + DIFFERS, spread) < ends[source] and saved > self.seconds.to_move(array.shape):
                    candidates.append((end, target, array))
        for _, target, array in sorted(candidates, key=lambda candidate: candidate[:2]):
            if self._fits(target, [array, *self._on(target)]):
                return array, target
        return None

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


# Epoch times of arrays on the devices of a sweep: estimates, corrected by measurements.

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

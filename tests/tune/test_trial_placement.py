"""Placement of the trials and arrays of a sweep by measured times: rounds are simulated, nothing is trained."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hfusion.cluster.messages import DeviceInfo
from hfusion.device.calibrate import Rates
from hfusion.tune.epoch_result import EpochResult
from hfusion.tune.shape_array import Shape, ShapeArray, TrialSlot
from hfusion.tune.trial_placement import TrialPlacement

EPOCHS, ROUNDS, STEPS = 6, 40, 10
FIRST: Any = SimpleNamespace(suggestion=SimpleNamespace(choices=None))
SAME: Any = SimpleNamespace(same_as=lambda model: True)
RATES = Rates(173e9, 11.3e9, 490e3, 7.1e9, 7.6e9, 1.1e9, 1.2e9)


@dataclass
class Estimates:
    """A footprint: seconds of a step, and no bytes."""

    call: float
    row: float

    def held(self, rows: int) -> int:
        return 0

    passing = held

    def seconds(self, rows: int) -> float:
        return self.call + self.row * rows if rows else 0.0


@dataclass
class Nowhere:
    """Workers that do nothing."""

    devices: Sequence[DeviceInfo]
    lost_devices: Sequence[int] = ()
    busy: Sequence[int] = ()

    def open(self, name: str, device: int, choices: Any) -> None: ...
    def send(self, name: str, method: str, *args: Any) -> None: ...
    def drop(self, name: str, *, collect: bool) -> None: ...


def nowhere(count: int) -> Any:
    """Its devices are alike, as far as estimates know."""
    return Nowhere([DeviceInfo(f"cpu:{n}", torch.device("cpu"), 1 << 30, RATES, 0.0) for n in range(count)])


def _estimates(call: float, device: DeviceInfo) -> Any:
    return Estimates(call, 1e-4)


@dataclass
class Sweep:
    """Trials of ``shapes`` in ``rows`` rows; after an epoch a third of them is pruned.

    A device takes ``slow`` times what was estimated, a shape ``odd`` times, and an epoch up to ``noise`` more.
    """

    slow: Sequence[float]
    odd: Sequence[float]
    rows: int | None
    measured: bool
    noise: float = 0.0
    together: bool = False
    # Rounds after which the devices are as ``later`` says.
    change: int = ROUNDS
    later: Sequence[float] = ()
    seconds: list[float] = field(default_factory=list)
    moves: int = 0
    began: list[int] = field(default_factory=list)

    def run(self, seed: int = 0) -> Sweep:
        self.draw = random.Random(seed)
        self.shapes = [Shape(FIRST, partial(_estimates, 1e-3 + 1e-4 * number), SAME) for number in range(len(self.odd))]
        self.rooms = TrialPlacement(
            nowhere(len(self.slow)),
            1000,
            lambda: self.rows or 1000,
            fixed=self.rows is not None,
            together=self.together,
        )
        self.count, self.waiting = 0, self.draw.randrange(len(self.shapes))
        for round_number in range(ROUNDS):
            self._refill(round_number)
            if self.measured:
                self.moves += len(self.rooms.moves(lambda array: EPOCHS))
            self._epoch(round_number)
        return self

    def _refill(self, round_number: int) -> None:
        joined = 0
        while (array := self.rooms.room_for(self.shapes[self.waiting])) is not None:
            trial: Any = SimpleNamespace(number=self.count, suggestion=None, tag=f"trial {self.count}")
            self.rooms.join(array, trial)
            self.count, self.waiting, joined = self.count + 1, self.draw.randrange(len(self.shapes)), joined + 1
        self.began.append(joined)
        for array in self.rooms.arrays:
            if array.joining:
                array.assign_slots(round_number)
        self.rooms.give_back()

    def _true(self, array: ShapeArray, round_number: int) -> float:
        slow = (self.later if round_number >= self.change else self.slow)[array.device]
        estimated = array.shape.footprint(self.rooms._workers.devices[0]).seconds(array.width)
        odd = self.odd[self.shapes.index(array.shape)]
        return (
            STEPS * estimated * slow * odd * (1 + self.noise * random.Random(f"{round_number} {array.name}").random())
        )

    def _epoch(self, round_number: int) -> None:
        busy = [0.0] * len(self.slow)
        slots: list[tuple[ShapeArray, TrialSlot]] = []
        for array in self.rooms.arrays:
            seconds = self._true(array, round_number)
            busy[array.device] += seconds
            if self.measured:
                self.rooms.seconds.note(array, EpochResult({}, seconds, 0.0, STEPS))
            slots += [(array, slot) for slot in array.slots.values()]
        self.seconds.append(max(busy))
        for array, slot in sorted(slots, key=lambda pair: pair[1].number):
            slot.epochs += 1
            if slot.epochs == EPOCHS or self.draw.random() < 1 / 3:
                del array.slots[slot.tag]


def both(seed: int = 0, **settings: Any) -> tuple[Sweep, Sweep]:
    """By estimates, and by what was measured; both ask the same trials at the same times."""
    first, measured = (Sweep(measured=use_measurements, **settings).run(seed) for use_measurements in (False, True))
    assert first.began == measured.began
    return first, measured


@pytest.mark.parametrize("rows", [32, None])
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        # What a device takes that is three times slower than said.
        ({"slow": [1, 3], "odd": [1]}, 0.75),
        ({"slow": [1, 1, 1, 3], "odd": [1, 1, 1]}, 0.6),
        # One that becomes so.
        ({"slow": [1, 1], "odd": [1, 1], "change": 10, "later": [1, 3]}, 0.8),
        # Where estimates hold nothing is gained; nor where all are wrong by the same.
        ({"slow": [1, 1], "odd": [1, 1]}, 1.0),
        ({"slow": [3, 3], "odd": [1]}, 1.0),
    ],
)
def test_rounds_are_shorter_by_what_was_measured(settings: dict[str, Any], most: float, rows: int | None) -> None:
    first, measured = both(rows=rows, **settings)
    assert sum(measured.seconds) <= most * sum(first.seconds)


def test_rounds_of_devices_and_shapes_that_take_other_times_than_estimated() -> None:
    """Of 60 such sweeps none is a fifth longer: to open one more array costs what its first row takes."""
    ratios = []
    for seed in range(20):
        draw = random.Random(seed)
        slow, odd = ([draw.uniform(0.3, 3) for _ in range(draw.randint(least, 4))] for least in (2, 1))
        first, measured = both(seed, slow=slow, odd=odd, rows=8 * len(slow), noise=0.2)
        ratios.append(sum(measured.seconds) / sum(first.seconds))
    assert mean(ratios) < 0.75
    assert max(ratios) < 1.2


def test_whole_arrays_rebalance_what_does_not_end() -> None:
    """All trials of a shape are together, so that none joins elsewhere."""
    settings: dict[str, Any] = {"slow": [1, 4], "odd": [1, 1, 1, 1], "rows": 32, "together": True}
    first, measured = both(**settings)
    assert sum(measured.seconds) < 0.8 * sum(first.seconds)
    assert 0 < measured.moves < 10


@pytest.mark.parametrize(
    ("factors", "startup", "remaining_epochs", "moves"),
    [
        ([3.0, 3.0], 0.0, 5, True),
        # One epoch may be an odd one.
        ([3.0], 0.0, 5, False),
        # It takes now less, now more, by as much as the move would save.
        ([3.0, 1.5, 3.0], 0.0, 5, False),
        # To begin elsewhere costs more than is saved in what is left.
        ([3.0, 3.0], 4.0, 5, True),
        ([3.0, 3.0], 4.0, 3, False),
        # No slower than said.
        ([1.0, 1.0], 0.0, 5, False),
    ],
)
def test_an_array_goes_where_that_saves_more_than_it_costs(
    factors: list[float], startup: float, remaining_epochs: int, moves: bool
) -> None:
    """Two arrays on the second of two devices, and one as long as these on the first."""
    shapes = [Shape(FIRST, lambda _: Estimates(0, 0.1), SAME), Shape(FIRST, lambda _: Estimates(0, 0.05), SAME)]
    rooms = TrialPlacement(nowhere(2), 1000, lambda: 8, fixed=True, together=False)
    for number, (shape, device) in enumerate([(0, 0), (1, 1), (1, 1)]):
        array = ShapeArray(f"array-{number}", shapes[shape], device)
        array.slots, array.width = {"trial": TrialSlot(0, FIRST.suggestion, 0)}, 1
        rooms.arrays.append(array)
    for factor in factors:
        for array in rooms.arrays:
            estimated = array.shape.footprint(rooms._workers.devices[0]).seconds(1)
            seconds = estimated * (factor if array.device else 1.0)
            rooms.seconds.note(array, EpochResult({}, STEPS * seconds, startup, STEPS))
    targets = rooms.moves(lambda array: remaining_epochs)
    assert targets == ({"array-1": 0} if moves else {})

"""A sweep whose arrays report when they are ready: none waits for the epochs of others."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hfusion.tune.shape_array import ShapeArray
from hfusion.tune.sweep_runner import SweepRunner
from hfusion.tune.training_setup import EpochResult


class AsynchronousSweepRunner(SweepRunner):
    """A `SweepRunner` that reports, prunes and replaces trials as soon as their own array has trained an epoch.

    A device trains one array at a time: the one in the earliest round. No trial joins or leaves an array while it
    trains, so that all arrays can be saved between any two reports. The array that reports next is recorded before it
    reports, so a resumed sweep repeats the decisions of the killed one.
    """

    rounds = "asynchronous"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._results: dict[str, EpochResult] = {}

    def run(self) -> None:
        """Train until every trial has finished."""
        self._order = ReportOrder(None if self._folder is None else self._folder.root, self._reported)
        if not self.placement.arrays:
            self._refill()
            self.save()
        while self.placement.arrays:
            began = time.monotonic()
            array = self._next_ready()
            self._order.note(array.name, sorted(slot.number for slot in array.slots.values()))
            self._reported, self._replays = self._order.count, bool(self._order.replayed)
            assert array.round is not None
            self._round, array.training = array.round, False
            self._report({array.name: self._results.pop(array.name)}, [array])
            self._end_round(1, time.monotonic() - began)
            self.save()

    def resume(self, body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._reported = body["reported"]
        super().resume(body, tensors)

    def _next_ready(self) -> ShapeArray:
        """Wait for the array that reports next: the first that is ready, or in a resumed sweep the recorded one."""
        while True:
            arrays = {array.name: array for array in self.placement.arrays}
            self._order.skip_missing(arrays)
            next_name = self._order.replayed[0] if self._order.replayed else next(iter(self._results), None)
            if next_name is not None and next_name in self._results:
                return arrays[next_name]
            self._start(next_name)
            name, self._results[name] = self._workers.first()

    def _start(self, preferred: str | None) -> None:
        """Start an epoch of one array on each idle device, preferably of the array named ``preferred``."""
        by_device: dict[int, list[ShapeArray]] = {}
        for array in self.placement.arrays:
            by_device.setdefault(array.device, []).append(array)
        for device, arrays in by_device.items():
            idle = [array for array in arrays if array.slots and not array.training]
            if device in self._workers.busy or not idle or self._unheard(arrays):
                continue
            chosen = min(idle, key=lambda array: (array.name != preferred, array.round))
            # Plain trials of all shapes are spread over the cores together.
            several = chosen.plain and self._workers.side_by_side > 1
            group = [array for array in idle if array.plain] if several else [chosen]
            for array in group:
                array.training = True
            self._workers.start({array.name: self._epoch(array) for array in group})

    def _unheard(self, arrays: list[ShapeArray]) -> bool:
        """Return whether any of these arrays has started an epoch whose result has not arrived."""
        return any(array.training and array.name not in self._results for array in arrays)


# The order in which the arrays of a sweep report, as a file that a resumed sweep replays.

ORDER = "order.txt"


class ReportOrder:
    """A file with one line per epoch of an array, written before the first of its trials is reported.

    Args:
        root: the folder of the sweep; None: nothing is written.
        count: the number of lines before the saved state. Later lines are replayed in their order.

    Attributes:
        replayed: the names of the arrays that report next, in the order recorded by the killed sweep.
    """

    def __init__(self, root: Path | None, count: int) -> None:
        self.count, self._path = count, None if root is None else root / ORDER
        self.replayed: deque[str] = deque()
        if self._path is None or not self._path.exists():
            return
        written = self._path.read_bytes()
        # An incomplete last line was never used: reports begin after the line is written.
        complete = written[: written.rfind(b"\n") + 1]
        os.truncate(self._path, len(complete))
        self.replayed.extend(line.split()[0].decode() for line in complete.splitlines()[count:])

    def skip_missing(self, names: Collection[str]) -> None:
        """Drop recorded arrays from the front as long as they are not in ``names``."""
        while self.replayed and self.replayed[0] not in names:
            self.replayed.popleft()
            self.count += 1

    def note(self, name: str, numbers: Sequence[int]) -> None:
        """Record that array ``name`` reports next, with its trials in the order of ``numbers``; or replay that."""
        self.count += 1
        if self.replayed:
            assert self.replayed.popleft() == name
        elif self._path is not None:
            with self._path.open("a") as file:
                print(name, *numbers, file=file)
                file.flush()
                os.fsync(file.fileno())

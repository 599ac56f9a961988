"""Assign arrays to devices from cost estimates, without contacting any worker.

Arrays are placed longest first, and an idle device takes arrays that wait for another device. If measured times differ
from the estimates, waiting arrays are placed again (introspection, as in Saturn: K. Nagrecha and A. Kumar, 2023).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from hfusion.cluster.longest_first import Load, lower_bound, place_arrays
from hfusion.cluster.rates import DIFFERS, ArrayProgress, Ratios

# Placement is reconsidered after news of a 16th of the arrays that wait or run, so after any news if these are few.
# With 10,000 arrays on 1,000 devices a decision then costs less than a millisecond.
_OFTEN = 16


@dataclass(eq=False)
class _OnDevice:
    """An array on a device. ``heard``: the time of its last progress report; before the first one, ``start_time``.

    ``startup``: seconds from ``start_time`` to its first progress report.
    """

    number: int
    start_time: float
    heard: float
    progress: ArrayProgress | None = None
    startup: float = 0.0


@dataclass(frozen=True)
class _Leaving:
    """A running array that moves to the device ``target``. ``request_time``: when it was asked to leave its device."""

    target: int
    request_time: float


class Placement:
    """The array that each device trains, and the queue of arrays that wait for it.

    Measured times correct the estimates, see `Ratios`. Waiting arrays are placed again if the run then ends sooner.
    The running array that ends last moves to an idle device if the run ends sooner, with the cost of moving counted.

    Args:
        kinds: the kind of each device, an index into ``Load.seconds``.
        max_failures: how often the device of an array may be lost before the array is given up.
        clock: returns the time in seconds.
        saved: indices of the arrays that have checkpoints, so that they resume on another device.

    Raises:
        PlanError: an array fits no device.
    """

    def __init__(
        self,
        loads: Sequence[Load],
        kinds: Sequence[int],
        max_failures: int,
        clock: Callable[[], float],
        saved: Collection[int] = (),
    ) -> None:
        self._loads, self._kinds, self._max_failures, self._clock = list(loads), list(kinds), max_failures, clock
        self._saved = frozenset(saved)
        self._ratios = Ratios([load.task for load in loads])
        self._steps = [0] * len(loads)
        self._queues: list[deque[int]] = []
        # Estimated seconds of each waiting array on the device that it waits for.
        self._planned: dict[int, float] = {}
        self._waiting = [0.0] * len(kinds)
        self._running: dict[int, _OnDevice] = {}
        self._leaving: dict[int, _Leaving] = {}
        self._handover = 0.0
        self._lost_devices: set[int] = set()
        # Idle devices for which `start_next` was not called since the queues, or the estimates, last changed.
        self._unasked: set[int] = set()
        # Kinds and speeds of devices for which, since then, no other queue had a suitable array.
        self._fruitless: set[tuple[int, float]] = set()
        # Number of new measurements since all idle devices were last marked as not asked.
        self._unheeded = 0
        # Number of new measurements since the last placement, and of events since the last search for moves.
        self._news = self._stirs = 0
        self.failures = [0] * len(loads)
        # The arrays that fit none of the remaining devices.
        self.stranded: list[int] = []
        self._arrange(range(len(loads)))

    @property
    def idle(self) -> list[int]:
        """The devices that are not lost, train no array, and are no target of a move."""
        busy = self._lost_devices.union(self._running, (move.target for move in self._leaving.values()))
        return [device for device in range(len(self._kinds)) if device not in busy]

    def to_ask(self) -> list[int]:
        """Return the idle devices for which `start_next` may return an array, without those that got None."""
        self._arrange_by_news()
        if not self._planned:
            return []
        if self._unheeded * _OFTEN > len(self._kinds) - len(self._running):
            self._ask_all()
        return sorted(self._unasked)

    @property
    def over(self) -> bool:
        """True if no array runs or waits."""
        return not self._running and not self._planned and not self.stranded

    @property
    def lower_bound(self) -> float:
        """A lower bound for the seconds of the run, by estimates for all devices, lost ones included."""
        return lower_bound(self._loads, self._kinds)

    def _whole(self, number: int, device: int) -> float | None:
        """Return the estimated seconds of a whole array on a device; None if it does not fit."""
        return self._loads[number].seconds[self._kinds[device]]

    def _seconds(self, number: int, device: int) -> float | None:
        """Return the seconds for the rest of an array, corrected by measurements; None if it does not fit."""
        estimate, remaining = self._whole(number, device), 1 - self._steps[number] / self._loads[number].steps
        return None if estimate is None else estimate * remaining * self._ratios.factor(number, device)

    def _remaining_seconds(self, device: int) -> float:
        """Return the seconds until the array that runs on a device ends; 0 for an idle device."""
        if device not in self._running:
            return 0.0
        run = self._running[device]
        return max(0.0, run.heard + (self._seconds(run.number, device) or 0.0) - self._clock())

    def _busy_seconds(self) -> list[float | None]:
        """Return the seconds until each device ends its array, or one that moves to it; None for a lost device."""
        seconds = [
            None if device in self._lost_devices else self._remaining_seconds(device)
            for device in range(len(self._kinds))
        ]
        for source, move in self._leaving.items():
            if move.target not in self._lost_devices:
                run = self._running[source]
                seconds[source] = self._handover
                seconds[move.target] = self._handover + run.startup + (self._seconds(run.number, move.target) or 0.0)
        return seconds

    def _placed(self, waiting: Iterable[int], busy: Sequence[float | None]) -> list[list[int]]:
        """Return the best placement of waiting arrays, by current estimates."""
        factors = {n: self._ratios.of_array(n) * (1 - self._steps[n] / self._loads[n].steps) for n in waiting}
        slow = [self._ratios.of_device(device) for device in range(len(self._kinds))]
        return place_arrays(self._loads, factors, self._kinds, busy, slow)

    def _end(self, placed: Sequence[Collection[int]], busy: Sequence[float | None]) -> float:
        """Return the seconds until all arrays end with this placement; ``busy`` as in `place_arrays`."""
        return max(
            (busy_seconds or 0.0) + math.fsum(self._seconds(number, device) or 0.0 for number in numbers)
            for device, (numbers, busy_seconds) in enumerate(zip(placed, busy, strict=True))
        )

    def _arrange(self, waiting: Collection[int]) -> None:
        self._settle(self._placed(waiting, self._busy_seconds()))

    def _settle(self, placed: Sequence[Collection[int]]) -> None:
        self._queues = [deque(numbers) for numbers in placed]
        self._planned = {
            number: self._seconds(number, device) or 0.0
            for device, queue in enumerate(self._queues)
            for number in queue
        }
        self._waiting = [math.fsum(self._planned[number] for number in queue) for queue in self._queues]
        self._ask_all()
        self._news = 0

    def _ask_all(self) -> None:
        self._unasked, self._unheeded = set(self.idle), 0
        self._fruitless.clear()

    def _ask(self, device: int) -> None:
        """Mark a device as not asked if it is idle."""
        self._fruitless.clear()
        busy = device in self._running or device in self._lost_devices
        if not busy and all(device != move.target for move in self._leaving.values()):
            self._unasked.add(device)

    def _arrange_by_news(self) -> None:
        """Place waiting arrays again if there are enough new measurements and the run then ends clearly sooner."""
        if self._news * _OFTEN <= max(len(self._planned), len(self._running)) or not self._planned:
            return
        busy = self._busy_seconds()
        placed = self._placed(self._planned, busy)
        better = self._end(placed, busy) * (1 + DIFFERS) < self._end(self._queues, busy)
        self._settle(placed if better else self._queues)

    def start_next(self, device: int) -> int | None:
        """Return the array that an idle device trains next; None if no waiting array would end earlier there."""
        self._unasked.discard(device)
        owner = device if self._queues[device] else self._taken_from(device)
        if owner is None:
            return None
        number = self._queues[owner].popleft() if owner == device else self._queues[owner].pop()
        self._waiting[owner] -= self._planned.pop(number)
        self._running[device] = _OnDevice(number, self._clock(), self._clock())
        return number

    def _taken_from(self, device: int) -> int | None:
        """Return the device with most waiting work whose last array would end on ``device`` no later; else None."""
        speed = self._kinds[device], self._ratios.of_device(device)
        if speed in self._fruitless:
            return None
        order = sorted(
            (candidate for candidate, queue in enumerate(self._queues) if queue),
            key=self._waiting.__getitem__,
            reverse=True,
        )
        for owner in order:
            seconds = self._seconds(self._queues[owner][-1], device)
            if seconds is not None and seconds <= self._waiting[owner] + self._remaining_seconds(owner):
                return owner
        self._fruitless.add(speed)
        return None

    def reach(self, device: int, steps: int, at: float) -> None:
        """Note that a device's array had ``steps`` minibatches at time ``at`` of the device's clock."""
        run = self._running[device]
        estimate, load = self._whole(run.number, device), self._loads[run.number]
        run.heard, self._steps[run.number] = self._clock(), min(steps, load.steps)
        if run.progress is None:
            run.progress, run.startup = ArrayProgress(steps, at), run.heard - run.start_time
            return
        run.progress.reach(steps, at)
        seconds = run.progress.seconds
        if seconds is not None and estimate and self._ratios.note(run.number, device, seconds * load.steps / estimate):
            self._news, self._stirs, self._unheeded = self._news + 1, self._stirs + 1, self._unheeded + 1

    def moves(self) -> list[int]:
        """Return the devices whose arrays are to leave now, each once.

        After `queue_moved_array` the arrays wait for their target.
        """
        sources: list[int] = []
        if self._stirs * _OFTEN <= len(self._running):
            return sources
        while (move := self._move()) is not None:
            source, target = move
            self._leaving[source] = _Leaving(target, self._clock())
            self._unasked.discard(target)
            sources.append(source)
        self._stirs = 0
        return sources

    def _move(self) -> tuple[int, int] | None:
        """Return the source and target of a move of the array that ends last, if the run then ends sooner; else None.

        While many arrays wait, no array is moved: placing the waiting ones again balances the load at no cost.
        """
        if len(self._planned) >= len(self._kinds) or not (idle := self.idle):
            return None
        busy = self._busy_seconds()
        ends = [(busy_seconds or 0.0) + waiting for busy_seconds, waiting in zip(busy, self._waiting, strict=True)]
        source = max(range(len(ends)), key=ends.__getitem__)
        run = self._running.get(source)
        if run is None or run.number not in self._saved or source in self._leaving or self._queues[source]:
            return None
        minibatch_seconds = None if run.progress is None else run.progress.seconds
        if minibatch_seconds is None:
            return None
        leave_seconds = max(self._handover, minibatch_seconds)
        candidates = [
            (leave_seconds + run.startup + s, d) for d in idle if (s := self._seconds(run.number, d)) is not None
        ]
        if not candidates:
            return None
        target_end, target = min(candidates)
        busy[target], busy[source] = target_end, leave_seconds
        placed = self._placed(self._planned, busy)
        if self._end(placed, busy) * (1 + DIFFERS) >= ends[source]:
            return None
        self._settle(placed)
        return source, target

    def queue_moved_array(self, device: int) -> None:
        """Note that an array has left its device: it waits first in the queue of its target, if that is not lost."""
        number, move = self._running.pop(device).number, self._leaving.pop(device)
        self._handover = max(self._handover, self._clock() - move.request_time)
        self._stirs += 1
        if move.target in self._lost_devices:
            self._arrange_fitting([*self._planned, *self.stranded, number])
            return
        self._queues[move.target].appendleft(number)
        self._planned[number] = seconds = self._seconds(number, move.target) or 0.0
        self._waiting[move.target] += seconds
        self._ask(device)
        self._ask(move.target)

    def end(self, device: int) -> int:
        """Note that the array on a device has ended or failed, and return its index."""
        move, number = self._leaving.pop(device, None), self._running.pop(device).number
        self._stirs += 1
        self._ask(device)
        if move is not None:
            self._ask(move.target)
        return number

    def lose(self, device: int, *, back: bool) -> list[int]:
        """Note that a device was lost; ``back``: it was restarted. Return its array if it must be given up.

        Otherwise that array waits again. All waiting arrays are placed again.
        """
        waiting, lost = [*self._planned, *self.stranded], list[int]()
        if device in self._running:
            number = self.end(device)
            self.failures[number] += 1
            if number not in self._saved:
                self._steps[number] = 0
            (waiting if self.failures[number] <= self._max_failures else lost).append(number)
        if not back:
            self._lost_devices.add(device)
        self._arrange_fitting(waiting)
        return lost

    def join(self, kind: int, seconds: Sequence[float | None] | None = None) -> None:
        """Append a device of this kind; if the kind is new, ``seconds`` are the estimates of each array on it.

        All waiting arrays are placed again.
        """
        if seconds is not None:
            pairs = zip(self._loads, seconds, strict=True)
            self._loads = [replace(load, seconds=(*load.seconds, estimate)) for load, estimate in pairs]
        self._kinds.append(kind)
        self._stirs += 1
        self._arrange_fitting([*self._planned, *self.stranded])

    def give_up_stranded(self) -> list[int]:
        """Return the stranded arrays and forget them."""
        stranded, self.stranded = self.stranded, []
        return stranded

    def _arrange_fitting(self, waiting: Collection[int]) -> None:
        """Place the arrays that fit a device that is not lost. The others become stranded."""
        kinds = {kind for device, kind in enumerate(self._kinds) if device not in self._lost_devices}
        fitting = [n for n in waiting if any(self._loads[n].seconds[kind] is not None for kind in kinds)]
        self.stranded = sorted(set(waiting).difference(fitting))
        self._arrange(fitting)

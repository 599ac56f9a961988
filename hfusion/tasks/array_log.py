"""Events of the arrays of `hfusion.train`, and their log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from torch import Tensor

from hfusion.core.event_log import EventLog
from hfusion.tasks.task import Evaluation, Step, Task

# Seconds between lines that only tell that an array goes on; an epoch has a line of its own.
_PAUSE = 5.0
# Members whose losses are all in a line.
_SHOWN = 8


@dataclass(frozen=True)
class ArrayNote:
    """An event of an array other than its results.

    Attributes:
        event: started, resumed, copied (before a save is written), saved, stopped, finished, failed, lost or moved.
        minibatches: how many it had been trained on.
        members: those that have stopped.
        error: the first line of one.
    """

    event: str
    minibatches: int | None
    members: tuple[int, ...] = ()
    error: str | None = None


ArrayEvent: TypeAlias = Step | Evaluation | ArrayNote
# Called with the index of an array, the event, and the device if there is one; from threads of devices and of saves.
ArrayListener: TypeAlias = Callable[[int, ArrayEvent, str | None], None]


@dataclass
class _ArrayCounts:
    """What the log already contains of an array: counts of trained minibatches, evaluated epochs, saved minibatches."""

    name: str
    members: int
    epoch: int
    steps: int
    trained: int = 0
    evaluated: int = 0
    saved: int = 0
    at: float = -math.inf
    stopped: set[int] = field(default_factory=set)


class ArrayLogs:
    """Writes the events of arrays to their logs.

    Events are identified by their counts of minibatches and epochs. A repeated event, from an array that trains again
    after it lost its process, is not written again.

    Args:
        arrays: the name, task and members of each.
    """

    def __init__(self, log: EventLog, arrays: Sequence[tuple[str, Task, Sequence[int]]]) -> None:
        self._log = log
        epochs = {id(task): task.epoch for _, task, _ in arrays}
        self._arrays = [
            _ArrayCounts(name, len(members), epochs[id(task)], task.epochs * epochs[id(task)])
            for name, task, members in arrays
        ]

    def hear(self, index: int, event: ArrayEvent, place: Mapping[str, object]) -> None:
        """Write an event of an array. ``place``: fields for the device, node and process."""
        if not self._log.writes or (isinstance(event, ArrayNote) and event.event == "copied"):
            return
        one = self._arrays[index]
        if isinstance(event, ArrayNote):
            if self._is_new(one, event):
                minibatches = one.trained if event.minibatches is None else event.minibatches
                self._write(one, event.event, minibatches, place, error=event.error)
        elif isinstance(event, Step):
            done = event.epoch * one.epoch + event.step + 1
            ends, now = done % one.epoch == 0, time.monotonic()
            if done > one.trained and (ends or now - one.at > _PAUSE):
                one.trained, one.at = done, now
                self._write(one, "trained", done, place, loss=_short(event.losses))
        elif event.epoch >= one.evaluated:
            one.evaluated = event.epoch + 1
            self._write(one, "evaluated", one.evaluated * one.epoch, place, loss=_short(event.losses.mean(0)))

    def _is_new(self, one: _ArrayCounts, note: ArrayNote) -> bool:
        if note.event == "saved" and note.minibatches is not None:
            before, one.saved = one.saved, max(one.saved, note.minibatches)
            return one.saved > before
        known = len(one.stopped)
        one.stopped.update(note.members)
        return note.event != "stopped" or len(one.stopped) > known

    def _write(
        self, one: _ArrayCounts, event: str, minibatches: int, place: Mapping[str, object], **values: str | None
    ) -> None:
        counts = {
            "epoch": f"{minibatches // one.epoch}/{one.steps // one.epoch}",
            "minibatch": f"{minibatches}/{one.steps}",
            "members": f"{one.members - len(one.stopped)}/{one.members}",
        }
        self._log.array(one.name, event, {**place, **counts, **values})


def _short(losses: Tensor) -> str:
    """Format the loss of each member, or for many members the least, the greatest and the median.

    >>> import torch
    >>> _short(torch.tensor([0.25, 0.5])), _short(torch.arange(9.0))
    ('0.25 0.5', '0 to 8, median 4')
    """
    values = [float(value) for value in losses.tolist()]
    if len(values) <= _SHOWN:
        return " ".join(f"{value:.4g}" for value in values)
    numbers = [value for value in values if not math.isnan(value)] or [math.nan]
    return f"{min(numbers):.4g} to {max(numbers):.4g}, median {median(numbers):.4g}"

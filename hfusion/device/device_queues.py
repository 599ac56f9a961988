"""Queues of work of a device, as `hfusion.device.backend` gives them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from enum import Enum, auto

import torch


class Queue:
    """A queue of work that a device does in order, concurrently with its other queues.

    This one is of the host, whose work is done as soon as it is queued.
    """

    def run(self, job: Callable[[], None]) -> None:
        """Call ``job``; the operators that it calls belong to this queue. They may be done later."""
        job()

    def wait(self) -> None:
        """Wait until all queued work is done."""

    def mark(self) -> torch.Event | None:
        """Return an event that tells when all work queued so far is done; None: only `wait` tells it."""
        return None

    def close(self) -> None:
        """Release the queue's resources. No work may be added to it afterwards."""


def recorded_event(device: torch.device, stream: torch.Stream | None = None) -> torch.Event:
    """Return an event at the current end of ``stream``, or of the current stream if None."""
    with torch.accelerator.device_index(device.index):
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device) if stream is None else stream)
    return event


class EventClock:
    """Converts events, in their order, to the times by ``host_clock`` at which the device reached them."""

    def __init__(self, host_clock: Callable[[], float]) -> None:
        self._host_clock = host_clock
        self._last: tuple[torch.Event, float] | None = None

    def ended(self, event: torch.Event) -> float:
        """Wait until all work before ``event`` is done, and return the time at which it was done."""
        late, before = event.query(), self._last
        if not late:
            event.synchronize()
        ended = self._host_clock()
        # The event was reached earlier than Python asked: compute the time from the device's clock.
        if late and before is not None:
            ended = min(ended, before[1] + before[0].elapsed_time(event) / 1e3)
        self._last = event, ended
        return ended

    def forget(self) -> None:
        """Forget the last event, so that the next one is not timed relative to it."""
        self._last = None


class StreamQueue(Queue):
    """A queue of a device that supports several queues."""

    def __init__(self, device: torch.device, copies: bool) -> None:
        self.stream, self._give_back = lend_stream(device, self, StreamUse.COPY if copies else StreamUse.COMPUTE)

    def run(self, job: Callable[[], None]) -> None:
        with self.stream:
            job()

    def wait(self) -> None:
        self.stream.synchronize()

    def mark(self) -> torch.Event | None:
        return recorded_event(self.stream.device, self.stream)

    def close(self) -> None:
        self._give_back()


class DeviceQueue(Queue):
    """The only queue of a device that does not support several. Events are untested on such devices."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        torch.accelerator.synchronize(self.device)


# Streams of devices, each lent to one owner at a time and used again afterwards.


class StreamUse(Enum):
    """The purpose of a stream. Streams for copies need no workspaces of libraries."""

    COMPUTE = auto()
    COPY = auto()
    RECORD = auto()


_idle: defaultdict[tuple[torch.device, StreamUse], list[torch.Stream]] = defaultdict(list)


def lend_stream(
    device: torch.device, owner: object, use: StreamUse
) -> tuple[torch.Stream, weakref.finalize[..., object]]:
    """Lend a stream of ``device`` until the returned function is called, or ``owner`` is no longer alive.

    A stream costs memory for as long as the process lives: cuBLAS keeps a workspace for each in which it has computed,
    32 MiB on an H100, and torch gives memory that was freed on a stream to that stream only.
    """
    idle = _idle[device, use]
    try:
        stream = idle.pop()
    except IndexError:
        stream = torch.Stream(device)
    # Work that is still queued runs before work of the next owner, as always on a stream.
    give_back = weakref.finalize(owner, idle.append, stream)
    give_back.atexit = False
    return stream, give_back

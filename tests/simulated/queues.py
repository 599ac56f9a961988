"""Order the work of simulated devices: queues whose heads are done in any order that events allow.

Nothing is done when it is asked for. A seeded draw decides what is done next, and how much, when a thread waits, asks
whether something is done, or asks for more: a device may lag behind Python as far as nobody waits for it, and one of
its queues behind the others.

Memory that was freed is poisoned under the queue in which it was taken, as torch's allocators hand it on to what that
queue does next; other queues that use it must have said so by ``record_stream``.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock, current_thread
from typing import Any

import torch
from torch import Tensor

DEVICES = 2
POISON = 0xFF
"""Bytes of which floats are NaN, and indices -1."""


_ELSEWHERE = 0
"""A queue that follows none, to plant faults."""
_SLOW = 0.002
_PAUSE_SECONDS = 0.002


class NeverDone(AssertionError):
    """A wait for work that none of the queued items will do."""


@dataclass(eq=False)
class Mark:
    """The position of a recorded event in a queue; ``done``: all work before it is done."""

    stream: int
    done: bool = False


@dataclass(eq=False)
class Block:
    """Memory of a device, or memory of the host that is pinned (``device`` -1), and who uses it."""

    number: int
    device: int
    bytes: Tensor
    stream: int
    users: set[int] = field(default_factory=set)

    def alias(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor of the host."""
        view = torch.empty(0, dtype=tensor.dtype)
        offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
        return view.set_(self.bytes.untyped_storage(), offset, size, stride)


@dataclass
class Item:
    """An entry of a queue: work, the recording of ``mark``, or waiting for it. ``awaited``: its result is used."""

    work: Callable[[], None] | None = None
    mark: Mark | None = None
    waits: bool = False
    awaited: bool = True

    @property
    def ready(self) -> bool:
        return not self.waits or (self.mark is not None and self.mark.done)

    def run(self) -> None:
        if self.work is not None:
            self.work()
        if self.mark is not None:
            self.mark.done = True


@dataclass(frozen=True)
class Fault:
    """A planted error at the ``number``-th call of ``kind``, at all of them if None.

    ``wait stream``, ``wait device``, ``wait`` (for an event), ``record``, ``stream waits``, ``used``: nothing is done.
    ``read``: the host does not wait for what it reads. ``queue``: an operator goes to the default queue. ``free``: the
    memory gets another use at once.
    """

    kind: str
    number: int | None = None


class Queues:
    """The queues and memory of all simulated devices.

    ``trace``: what was asked for, as `races` reads it. ``lag``: how far devices fall behind. ``reads``:
    how often the host waited for a queue to read a tensor; ``staged``: how often it copied memory that is not pinned;
    ``waits``: how often each thread waited for anything.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        # The stream of a device that is current in this thread.
        self.current: Callable[[int], int] = lambda device: -1 - device
        self.start(0)

    def start(self, seed: int, fault: Fault | None = None, lag: float | None = None) -> None:
        """Begin a run; nothing of another one may be left to do."""
        with self.lock:
            if getattr(self, "fault", None) is not None:
                # What a run with a fault has left may read unwritten memory.
                for items in self.items.values():
                    items.clear()
            self.drain()
            self.random = random.Random(seed)
            # From devices that are always done to those that do nothing before a thread waits.
            drawn = self.random.choice([0.0, 0.5, 0.9, 1.0])
            self.lag = drawn if lag is None else lag
            self.fault = fault
            self.counts: dict[str, int] = {}
            self.trace: list[tuple[Any, ...]] = []
            self.weights: dict[int, float] = {}
            self.serial = False
            self.reads = self.operators = self.staged = 0
            self.waits = Counter[str]()
            self.live = getattr(self, "live", {})
            self.taken = getattr(self, "taken", [0] * DEVICES)
            self.peak = list(self.taken)
            self.events: dict[int, Mark] = {}
            # Streams outlive runs: hf.train lends them again.
            self.streams = getattr(self, "streams", {-1 - device: device for device in range(DEVICES)})
            self.trace += [("stream", stream) for stream in self.streams if stream >= 0]
            self.items: dict[int, deque[Item]] = {stream: deque() for stream in (*self.streams, _ELSEWHERE)}
            self.number: int = getattr(self, "number", 0)
            self.errors: list[BaseException] = []

    def _dropped(self, kind: str) -> bool:
        """Return whether a planted fault drops this call."""
        count = self.counts[kind] = self.counts.get(kind, -1) + 1
        return self.fault is not None and self.fault.kind == kind and self.fault.number in (None, count)

    def _count(self) -> None:
        self.waits[current_thread().name] += 1

    # Doing what was asked for.

    def drain(self) -> None:
        """Do all."""
        items = getattr(self, "items", {})
        self._until(lambda: not any(items.values()))

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._one()

    def _one(self) -> None:
        ready = [stream for stream, items in self.items.items() if items and items[0].ready]
        if not ready:
            raise NeverDone("what is waited for will never be done")
        if len(ready) == 1 or self.serial:
            (chosen, *_) = ready
        else:
            chosen = self.random.choices(ready, [self._weight(stream) for stream in ready])[0]
        item = self.items[chosen].popleft()
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableTorchDispatch():
            item.run()

    def _weight(self, stream: int) -> float:
        """How eager a queue is; some hardly ever come first."""
        weight = self.weights.get(stream)
        if weight is None:
            weight = self.weights[stream] = self.random.choice([1.0, 1.0, 0.1, _SLOW / 2])
        return weight

    def _some(self) -> None:
        """Do a little, now and then."""
        while any(items and items[0].ready for items in self.items.values()) and self.random.random() >= self.lag:
            self._one()

    def _ask(self, stream: int, item: Item) -> None:
        """Add to a queue."""
        self.items[stream].append(item)
        if self.serial:
            self._until(lambda: not self.items[stream])
        self._some()

    def launch(
        self, stream: int, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], None]
    ) -> None:
        """Add an operator to a queue, with what it reads and writes."""
        with self.lock:
            default = -1 - self.streams[stream]
            if stream != default and self._dropped("queue"):
                stream = default
            ranges = [
                [byte_range for tensor in tensors for byte_range in self._range(tensor)] for tensors in (reads, writes)
            ]
            self.trace.append(("launch", stream, name, *ranges))
            self.operators += 1
            self._ask(stream, Item(work))

    def _range(self, tensor: Tensor) -> Iterator[tuple[int, int, int]]:
        """The block of a tensor and the bytes in it, from and to."""
        block = self.block(tensor)
        if block is not None and tensor.numel():
            start = tensor.data_ptr() - block.bytes.data_ptr()
            span = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
            yield block.number, start, start + span * tensor.element_size()

    def block(self, tensor: Tensor) -> Block | None:
        """The memory of a tensor of a device, or of one that is pinned; None if it is neither, or empty."""
        return self.live.get(tensor.untyped_storage().data_ptr())

    @contextmanager
    def beside(self, stream: int, other: int) -> Iterator[None]:
        """Order the work launched on ``stream`` after the earlier work of ``other``, and before its later work."""
        with self.lock:
            if stream != other:
                self._follow(stream, other)
            yield
            if stream != other:
                self._follow(other, stream)

    def _follow(self, stream: int, other: int) -> None:
        self.number += 1
        mark = Mark(other)
        self.trace += [("record", self.number, other), ("stream waits", self.number, stream)]
        self.items[other].append(Item(mark=mark))
        self.items[stream].append(Item(mark=mark, waits=True))

    def wait_here(self, stream: int) -> None:
        """A tensor is read on the host: until its queue has done all."""
        with self.lock:
            self.reads += 1
            self._count()
            if self._dropped("read"):
                return
            self.trace.append(("wait stream", stream))
            self._until(lambda: not self.items[stream])

    # What torch asks for.

    def allocate(self, device: int, size: int) -> int:
        with self.lock:
            block = self._block(device, size, self.current(device))
            self.taken[device] += size
            self.peak[device] = max(self.peak[device], self.taken[device])
            return block.bytes.data_ptr()

    def pin(self, size: int) -> int:
        with self.lock:
            return self._block(-1, size, 0).bytes.data_ptr()

    def _block(self, device: int, size: int, stream: int) -> Block:
        self.number += 1
        block = Block(self.number, device, torch.full((size,), POISON, dtype=torch.uint8), stream)
        self.live[block.bytes.data_ptr()] = block
        return block

    def release(self, address: int) -> None:
        with self.lock:
            block = self.live.pop(address)
            self.taken[block.device] -= len(block.bytes)
            if block.stream not in self.items:
                # Garbage of a run before.
                return
            if self._dropped("free"):
                block.stream = _ELSEWHERE
            for stream in block.users - {block.stream}:
                self._follow(block.stream, stream)
            self.trace.append(("launch", block.stream, "free", [], [(block.number, 0, len(block.bytes))]))
            self._ask(block.stream, Item(lambda: _poison(block), awaited=False))

    def unpin(self, address: int) -> None:
        # torch hands pinned memory on when the copies that it was asked for are done: what is queued holds it.
        with self.lock:
            self.live.pop(address)

    def pinned(self, address: int) -> int:
        with self.lock:
            return any(
                block.device < 0 and 0 <= address - block.bytes.data_ptr() < len(block.bytes)
                for block in self.live.values()
            )

    def used(self, address: int, stream: int) -> None:
        with self.lock:
            if not self._dropped("used"):
                self.live[address].users.add(stream)

    def allocated(self, device: int, peak: int) -> int:
        return (self.peak if peak else self.taken)[device]

    def forget_peak(self, device: int) -> None:
        with self.lock:
            self.peak[device] = self.taken[device]

    def stream(self, device: int) -> int:
        with self.lock:
            self.number += 1
            self.streams[self.number] = device
            self.items[self.number] = deque()
            self.trace.append(("stream", self.number))
            return self.number

    def record(self, event: int, stream: int) -> int:
        with self.lock:
            if not event:
                self.number += 1
                event = self.number
            if self._dropped("record"):
                return event
            mark = self.events[event] = Mark(stream)
            self.trace.append(("record", event, stream))
            self.items[stream].append(Item(mark=mark))
            self._some()
            return event

    def block_stream(self, event: int, stream: int) -> None:
        with self.lock:
            if event in self.events and not self._dropped("stream waits"):
                self.trace.append(("stream waits", event, stream))
                self.items[stream].append(Item(mark=self.events[event], waits=True))
                self._some()

    def wait(self, event: int) -> None:
        with self.lock:
            self._count()
            if event in self.events and not self._dropped("wait"):
                self.trace.append(("wait", event))
                mark = self.events[event]
                self._until(lambda: mark.done)

    def query(self, event: int) -> int:
        with self.lock:
            self._some()
            is_done = event not in self.events or self.events[event].done
            if is_done and event in self.events:
                self.trace.append(("wait", event))
            return is_done

    def forget(self, event: int) -> None:
        with self.lock:
            self.events.pop(event, None)

    def wait_stream(self, stream: int) -> None:
        with self.lock:
            self._count()
            if self._dropped("wait stream"):
                return
            self.trace.append(("wait stream", stream))
            self._until(lambda: not self.items[stream])
            slow = self._weight(stream) < _SLOW and self.random.random() < self.lag
        if slow:
            # Others may be faster than who has waited.
            time.sleep(_PAUSE_SECONDS)

    def query_stream(self, stream: int) -> int:
        with self.lock:
            self._some()
            is_done = not self.items[stream]
            if is_done:
                self.trace.append(("wait stream", stream))
            return is_done

    def wait_device(self, device: int) -> None:
        with self.lock:
            self._count()
            if self._dropped("wait device"):
                return
            queues = [self.items[stream] for stream, owner in self.streams.items() if owner == device]
            for stream, owner in self.streams.items():
                if owner == device:
                    self.trace.append(("wait stream", stream))
            self._until(lambda: not any(queues))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Context manager: do all work when it is launched."""
        with self.lock:
            self.drain()
        self.serial = True
        try:
            yield
        finally:
            self.serial = False

    def end(self) -> list[tuple[Any, ...]]:
        """End the run, and return its trace."""
        with self.lock:
            trace, self.trace = self.trace, []
            return trace

    @property
    def left(self) -> list[int]:
        """The queues with work that no thread has waited for."""
        return [stream for stream, items in self.items.items() if any(item.work and item.awaited for item in items)]


def _poison(block: Block) -> None:
    block.bytes.fill_(POISON)


QUEUES = Queues()

"""Asynchronous copies of losses from a device to the host."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from hfusion.device.backend import backend
from hfusion.device.device_queues import Mark, MarkClock

_SLOTS = 16
# Minibatches that a device may be behind Python. Python needs well under a millisecond for each, so more slots would
# not keep a device busier, but would delay callbacks.


class Arrived(NamedTuple):
    """The losses ``[B]`` of a minibatch on the host, and when the device had them, by `time.perf_counter`."""

    losses: Tensor
    at: float


class LossRing:
    """A ring buffer of pinned memory for the losses of the last minibatches.

    On a device without asynchronous copies, `put` waits for the losses. If the ring is full, it waits for the oldest.
    """

    def __init__(self) -> None:
        self._slots: Tensor | None = None
        self._kind: tuple[torch.device, torch.Size, torch.dtype] | None = None
        self._next = 0
        self._pending: deque[tuple[Tensor, Mark | None]] = deque()
        self._clock = MarkClock(perf_counter)

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, losses: Tensor) -> list[Arrived]:
        """Begin to copy ``losses [B]`` of the next minibatch; return those that have arrived, the oldest first."""
        if not backend(losses.device).pins:
            return [Arrived(losses.cpu(), perf_counter())]
        arrived = self._make_room(losses)
        assert self._slots is not None
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        slot.copy_(losses.detach(), non_blocking=True)
        self._pending.append((slot, backend(losses.device).mark()))
        while self._pending and (mark := self._pending[0][1]) is not None and mark.done:
            arrived.append(self._pop())
        return arrived

    def drain(self) -> list[Arrived]:
        """Wait for all pending losses and return them, the oldest first."""
        return [self._pop() for _ in range(len(self._pending))]

    def _make_room(self, losses: Tensor) -> list[Arrived]:
        """Ensure that a slot for such losses is free. Return the losses that left the ring for it."""
        kind = losses.device, losses.shape, losses.dtype
        if kind != self._kind:
            arrived = self.drain()
            self._slots = torch.empty(_SLOTS, *losses.shape, dtype=losses.dtype, pin_memory=True, device="cpu")
            self._kind, self._next, self._clock = kind, 0, MarkClock(perf_counter)
            return arrived
        return [self._pop()] if len(self._pending) == _SLOTS else []

    def _pop(self) -> Arrived:
        slot, mark = self._pending.popleft()
        at = perf_counter() if mark is None else self._clock.ended(mark)
        return Arrived(slot.clone(), at)

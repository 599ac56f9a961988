"""A resident task whose minibatches are steps of the whole array, with forward and backward in one program."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfusion.core.exclusive import compiling_within
from hfusion.device.backend import backend
from hfusion.device.device_queues import Mark, MarkClock
from hfusion.optim.clip import clip_stacks
from hfusion.runtime.copying import Move
from hfusion.runtime.process import Gate
from hfusion.runtime.recipe import WholeStep
from hfusion.runtime.sliced_training import SlicedTraining
from hfusion.runtime.training import Training
from hfusion.schedule.minibatch_slices import Ran, Slices
from hfusion.schedule.plan import Phase, Unit


class WholeTraining(SlicedTraining):
    """`SlicedTraining` on any device, with steps that may be compiled."""

    def __init__(self, *args: Any, step: WholeStep, slices: Slices) -> None:
        super().__init__(*args, slices=slices)
        self._step = step
        self._ring = LossRing()
        self._loss_times: list[float] = []
        self._trained = {name: self.state.parameter(name) for name in self.state.shards[0].trained}
        self._params = [self.state.parameter(name) for name in self.state.shards[0].all]

    @property
    def known_calls(self) -> list[str]:
        return self._step.known_calls

    def expect(self, calls: Sequence[str]) -> None:
        self._step.expect(calls)

    def mark_idle(self, rows: frozenset[int]) -> None:
        self._step.mark_idle(rows)

    @property
    def minibatches(self) -> int:
        return len(self.losses) + len(self._ring)

    def arrive(self) -> None:
        self._arrived(self._ring.drain())

    def _measured(self) -> Sequence[Ran]:
        return computed(self._times, self._loss_times)

    def run(self, unit: Unit, device: torch.device, gate: Gate) -> None:
        if unit.phase is not Phase.BACKWARD:
            super().run(unit, device, gate)
            return
        self.state.bind(0)
        # A step may trace or compile before it computes; no other thread may compute meanwhile.
        with compiling_within(gate.exclusive):
            super().run(unit, device, gate)

    def _arrived(self, arrived: Sequence[Arrived]) -> None:
        self.losses.extend(arrival.losses for arrival in arrived)
        self._loss_times.extend(arrival.at for arrival in arrived)

    def put_away(self, shard: int, *, leave: bool) -> list[Move]:
        self._step.release()
        return super().put_away(shard, leave=leave)

    def _minibatch(self, device: torch.device, gate: Gate) -> None:
        unit, began = self.slices.unit(self.minibatches, Phase.BACKWARD), perf_counter()
        recipe = self._read(self._source, device, gate)
        prepared = self._step.prepare(self._batch, device)
        read = perf_counter()
        computed = 0.0

        def update() -> None:
            nonlocal computed
            grads = {name: param.grad for name, param in self._trained.items() if param.grad is not None}
            for param in self._params:
                param.grad = None
            if self._carried:
                self._sum(grads)
            computed = perf_counter()
            if not self._carried:
                self.state.update(0, grads)
            elif self.plan.closes(unit.step):
                Training.update(self, unit, gate)

        with gate.computing():
            with self._drawing(self._generators, device):
                losses = self._step.run(prepared, update)
            self._arrived(self._ring.put(losses))
            self.state.wrote(0, [self._names[name] for name in recipe.parts[0].writes])
        self._finish_minibatch(unit, began, read, computed)

    def _clip_by_norm(self, grads: Mapping[str, Tensor], limits: Tensor) -> None:
        """Clip all gradients by their norms, in a few kernel launches on their device."""
        nonempty = [grads[name] for name in self.state.order if name in grads and grads[name].numel()]
        if nonempty:
            clip_stacks(nonempty, limits)

    def _sum(self, grads: dict[str, Tensor]) -> None:
        """Add gradients to the ones that outlive the minibatch."""
        if self.plan.accumulate > 1 and grads:
            torch._foreach_div_(list(grads.values()), self.plan.accumulate)
        self._collect(0, {f"param {name}": grad for name, grad in grads.items()})


def computed(queued: Sequence[Ran], loss_times: Sequence[float]) -> list[Ran]:
    """Return when minibatches ran on the device.

    ``queued``: when Python queued them; ``loss_times``: when the device had computed their losses.

    >>> computed([Ran(0, 1, 2, 3, 3), Ran(3, 4, 5, 6, 6)], [3, 10])[1]
    Ran(began=3, read=4, computed=5, ended=10, saved=10)
    """
    times, free = list[Ran](), 0.0
    for ran, end in zip(queued, loss_times, strict=False):
        ended = max(ran.ended, end)
        read = min(max(ran.read, free), ended)
        times.append(Ran(ran.began, read, max(ran.computed, read), ended, ended + ran.saved - ran.ended))
        free = times[-1].saved
    return times


# Asynchronous copies of losses from a device to the host.

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

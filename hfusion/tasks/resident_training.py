"""Resident tasks of one shard: minibatches are steps of the whole array, by `hfusion.train_step`.

A scheduled unit is a slice of several minibatches, as each decision costs time.
"""

from __future__ import annotations

import re
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import is_stacked
from hfusion.core.exclusive import compiling_within
from hfusion.device.backend import backend
from hfusion.device.device_queues import Mark, MarkClock
from hfusion.optim.clip import clip_stacks
from hfusion.runtime.copying import Move
from hfusion.runtime.process import Gate
from hfusion.runtime.training import Training
from hfusion.schedule.minibatch_slices import Ran, Slices
from hfusion.schedule.plan import Phase, TaskPlan, Unit
from hfusion.schedule.timeline import Span
from hfusion.step.step_graph import StepCall
from hfusion.step.train_step import train_step
from hfusion.tasks.arrange import Arrangement
from hfusion.tasks.minibatch import Minibatch, moved


class ResidentTraining(Training):
    """`Training` of one shard. A scheduled unit is a slice, all computed in the slice's backward unit.

    Args:
        eager: why the steps are not compiled; empty if they are.
    """

    def __init__(self, *args: Any, arrangement: Arrangement, slices: Slices, eager: str) -> None:
        super().__init__(*args)
        self.slices = slices
        self._times: list[Ran] = []
        self._first = 0
        self._saved_at: dict[int, float] = {}
        self._ring = LossRing()
        self._loss_times: list[float] = []
        self._trained = {name: self.state.parameter(name) for name in self.state.shards[0].trained}
        self._params = [self.state.parameter(name) for name in self.state.shards[0].all]
        task, self.compiled = arrangement.task, not eager
        # Whether compiling pays was decided before, see `hfusion.tasks.compile_choice`.
        compile = False if eager else True if task.compile is None else task.compile
        self.step = train_step(arrangement.array, task.loss, arrangement.optimizer, compile=compile, parts=task.parts)
        self.step.divisor = self.plan.accumulate
        if task.compile is None:
            # No warning is needed: the report gives the reason.
            self.step.tell = lambda call, why: None
        else:
            self.step.tell = partial(_warn, self.plan.name)
        # The kinds of calls, for any number of samples, that were compiled in the run that this one resumes.
        self._resumed_calls: set[str] = set()

    @property
    def scheduled(self) -> TaskPlan:
        return self.slices.scheduled

    def units_after(self, steps: int) -> int:
        self._first = steps
        return self.slices.unit_index_after(steps)

    def ran(self, unit: Unit) -> None:
        if unit.phase is Phase.EVALUATE:
            self.ended(unit)
            if self.plan.saves(unit) and not self.over:
                self._saved_at[unit.step] = perf_counter()
                self.save(unit)

    def spans(self, spans: Sequence[Span], began: float) -> Iterator[Span]:
        """Yield the spans of slices split into minibatches. ``began``: the start of the run, by `time.perf_counter`."""
        times = [Ran(*(time - began for time in ran)) for ran in device_times(self._times, self._loss_times)]
        saved = {step: time - began for step, time in self._saved_at.items()}
        return self.slices.spans(spans, times, self._first, saved)

    @property
    def known_calls(self) -> list[str]:
        return sorted({*map(any_samples, self.step.known_calls), *self._resumed_calls})

    def expect(self, calls: Sequence[str]) -> None:
        self._resumed_calls = set(calls)

    def mark_idle(self, rows: frozenset[int]) -> None:
        self.step.idle = rows

    @property
    def minibatches(self) -> int:
        return len(self.losses) + len(self._ring)

    def arrive(self) -> None:
        self._arrived(self._ring.drain())

    def _arrived(self, arrived: Sequence[Arrived]) -> None:
        self.losses.extend(arrival.losses for arrival in arrived)
        self._loss_times.extend(arrival.at for arrival in arrived)

    def put_away(self, shard: int, *, leave: bool) -> list[Move]:
        self.step.release()
        return super().put_away(shard, leave=leave)

    def run(self, unit: Unit, device: torch.device, gate: Gate) -> None:
        if unit.phase is Phase.EVALUATE:
            super().run(unit, device, gate)
        elif unit.phase is Phase.BACKWARD:
            self.state.bind(0)
            end = self.slices.end(unit.step)
            # A step may trace or compile before it computes; no other thread may compute meanwhile.
            with compiling_within(gate.exclusive):
                while self.minibatches < end and not self.over:
                    self._minibatch(device, gate)

    def update(self, unit: Unit, gate: Gate) -> None:
        """Do nothing: the backward unit of the slice includes the optimizer steps."""

    def _minibatch(self, device: torch.device, gate: Gate) -> None:
        unit, began = self.slices.unit(self.minibatches, Phase.BACKWARD), perf_counter()
        recipe = self._read(self._source, device, gate)
        inputs, target = _on(self._batch.call, device)
        if self._resumed_calls:
            # The program of a kind serves minibatches with another number of samples, too.
            text = StepCall(self._batch.call.arguments, Arguments.of((target,), {})).text
            if any_samples(text) in self._resumed_calls:
                self.step.expected_calls.add(text)
        prepared = self.step.prepare(inputs, target)
        read, computed = perf_counter(), 0.0

        def update(losses: Tensor) -> None:
            nonlocal computed
            grads = {name: param.grad for name, param in self._trained.items() if param.grad is not None}
            for param in self._params:
                param.grad = None
            if self._carried:
                self._collect(0, {f"param {name}": grad for name, grad in grads.items()})
            computed = perf_counter()
            if not self._carried:
                self.state.update(0, grads)
            elif self.plan.closes(unit.step):
                Training.update(self, unit, gate)

        with gate.computing():
            # Run it through the step, which may use threads of its own.
            self.step.update = update
            with self._drawing(self._generators, device):
                losses = self.step.run(prepared)
            self._arrived(self._ring.put(losses))
            self.state.wrote(0, [self._names[name] for name in recipe.parts[0].writes])
        self._finish_minibatch(unit, began, read, computed)

    def _clip_by_norm(self, grads: Mapping[str, Tensor], limits: Tensor) -> None:
        """Clip all gradients by their norms, in a few kernel launches on their device."""
        nonempty = [grads[name] for name in self.state.order if name in grads and grads[name].numel()]
        if nonempty:
            clip_stacks(nonempty, limits)

    def _finish_minibatch(self, unit: Unit, began: float, read: float, computed: float) -> None:
        """Handle the end of a minibatch: callbacks and scheduler steps, and the save if one is due."""
        self.ended(unit)
        if self.plan.clipped and self.plan.closes(unit.step):
            unit = self.slices.unit(unit.step, Phase.UPDATE)
            self.ended(unit)
        ended = perf_counter()
        if self.plan.saves(unit) and not self.over:
            self.save(unit)
        self._times.append(Ran(began, read, computed, ended, perf_counter()))


def _warn(name: str, call: str, why: str) -> None:
    warnings.warn(eagerly(name, f"with ({call}), {why}"), stacklevel=2)


def eagerly(name: str, why: str) -> str:
    """Return the warning text for a task that was to be compiled, but runs eagerly."""
    return f"task {name!r} runs eagerly, exact but slower: {why}. hf.Task(compile=False) does so without this warning"


def _on(minibatch: Minibatch, device: torch.device) -> tuple[Any, Any]:
    """Return the inputs and target of a minibatch on a device, as `hfusion.train_step` expects them."""
    arguments = minibatch.arguments
    leaves = [moved(leaf, device) for leaf in arguments.leaves]
    target = minibatch.target
    if not isinstance(target, Tensor):
        target = pytree.tree_map(lambda leaf: moved(leaf, device), target, is_leaf=is_stacked)
    else:
        target = moved(target, device)
    if isinstance(arguments.spec, int):
        return tuple(leaves), target
    args, kwargs = pytree.tree_unflatten(leaves, arguments.spec)
    return kwargs or args, target


def any_samples(call: str) -> str:
    """Describe a kind of call for any number of samples; a single sample may have another program.

    >>> any_samples("f32[32,64], stacked i64[3,32]"), any_samples("f32[1,64], f32[]")
    ('f32[*,64], stacked i64[3,*]', 'f32[1,64], f32[]')
    """
    return re.sub(r"(stacked \w+\[\d+,|(?<!stacked )\b\w+\[)(?!1\b)\d+", r"\1*", call)


def device_times(queued: Sequence[Ran], loss_times: Sequence[float]) -> list[Ran]:
    """Return when minibatches ran on the device.

    ``queued``: when Python queued them; ``loss_times``: when the device had computed their losses.

    >>> device_times([Ran(0, 1, 2, 3, 3), Ran(3, 4, 5, 6, 6)], [3, 10])[1]
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

# Minibatches that a device may be behind Python. Python needs well under a millisecond for each, so more slots would
# not keep a device busier, but would delay callbacks.
_SLOTS = 16


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

"""Resident tasks: minibatches are steps of the whole array, by `hfusion.train_step`.

A scheduled unit is a slice of several minibatches, as each decision costs time.
"""

from __future__ import annotations

import re
import warnings
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hfusion.compiler.arguments import Arguments
from hfusion.core.exclusive import compiling_within
from hfusion.device.backend import backend
from hfusion.device.device_queues import Mark
from hfusion.optim.clip import clip_stacks
from hfusion.runtime.task_state import Move
from hfusion.runtime.training import Gate, Training
from hfusion.schedule.engine import Slices
from hfusion.schedule.plan import Phase, TaskPlan, Unit
from hfusion.step.step_graph import StepCall
from hfusion.step.train_step import train_step
from hfusion.tasks.arrange import Arrangement

# Minibatches that a device may be behind Python. Python needs well under a millisecond for each, so more would not keep
# a device busier, but would delay callbacks.
_BEHIND = 16


class LossQueue:
    """Losses of minibatches that are being copied to the host. Methods return those that have arrived, in order."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Tensor, Mark | None]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, losses: Tensor) -> list[Tensor]:
        """Begin to copy the losses ``[B]`` of a minibatch. Wait for the oldest if too many have not arrived."""
        if not backend(losses.device).pins:
            return [losses.cpu()]
        self._pending.append((losses.detach().to("cpu", non_blocking=True), backend(losses.device).mark()))
        arrived = []
        while self._pending and (len(self) > _BEHIND or ((mark := self._pending[0][1]) is not None and mark.done)):
            arrived.append(self._oldest())
        return arrived

    def drain(self) -> list[Tensor]:
        """Wait for all."""
        return [self._oldest() for _ in range(len(self))]

    def _oldest(self) -> Tensor:
        losses, mark = self._pending.popleft()
        if mark is not None:
            mark.wait()
        # A copy, as page-locked memory is scarce.
        return losses.clone()


class ResidentTraining(Training):
    """`Training` of a resident task. A scheduled unit is a slice, all computed in the slice's backward unit.

    Args:
        eager: why the steps are not compiled; empty if they are.
    """

    def __init__(self, *args: Any, arrangement: Arrangement, slices: Slices, eager: str) -> None:
        super().__init__(*args)
        self.slices, self.scheduled = slices, slices.scheduled
        # Minibatches that earlier runs have trained.
        self.first = 0
        self._queue = LossQueue()
        self._trained = {name: self.state.parameter(name) for name in self.state.shards[0].trained}
        self._params = [self.state.parameter(name) for name in self.state.shards[0].all]
        task, self.compiled = arrangement.task, not eager
        # Whether compiling pays was decided before, see `eager_reason`.
        compile = False if eager else True if task.compile is None else task.compile
        self.step = train_step(arrangement.array, task.loss, arrangement.optimizer, compile=compile, parts=task.parts)
        self.step.divisor = self.plan.accumulate
        # A task that leaves the choice open needs no warning: the report gives the reason.
        self.step.tell = partial(_warn, self.plan.name) if task.compile is not None else lambda call, why: None

    def units_after(self, steps: int) -> int:
        self.first = steps
        return self.slices.unit_index_after(steps)

    def ran(self, unit: Unit) -> None:
        if unit.phase is Phase.EVALUATE:
            self._finish(unit)

    @property
    def known_calls(self) -> list[str]:
        return sorted({*map(any_samples, self.step.known_calls), *self.resumed_calls})

    @property
    def minibatches(self) -> int:
        return len(self.losses) + len(self._queue)

    def arrive(self) -> None:
        self.losses += self._queue.drain()

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
        unit = self.slices.unit(self.minibatches, Phase.BACKWARD)
        recipe = self._read(self._source, device, gate)
        minibatch = self._batch.on(device)
        args, kwargs = minibatch.arguments.args_and_kwargs()
        if self.resumed_calls:
            # The program of a kind serves minibatches with another number of samples, too.
            text = StepCall(minibatch.arguments, Arguments.of((minibatch.target,), {})).text
            if any_samples(text) in self.resumed_calls:
                self.step.expected_calls.add(text)
        prepared = self.step.prepare(kwargs or args, minibatch.target)

        def update(losses: Tensor) -> None:
            grads = {name: param.grad for name, param in self._trained.items() if param.grad is not None}
            for param in self._params:
                param.grad = None
            if self._carried:
                self._collect(0, {f"param {name}": grad for name, grad in grads.items()})
            if not self._carried:
                self.state.update(0, grads)
            elif self.plan.closes(unit.step):
                Training.update(self, unit, gate)

        with gate.computing():
            # Run it through the step, which may use threads of its own.
            self.step.update, self.step.idle = update, self.idle
            with self._drawing(self.generators, device):
                losses = self.step.run(prepared)
            self.losses += self._queue.put(losses)
            self.state.wrote(0, [self._names[name] for name in recipe.parts[0].writes])
        if self.plan.clipped and self.plan.closes(unit.step):
            self.ended(unit)
            unit = self.slices.unit(unit.step, Phase.UPDATE)
        self._finish(unit)

    def _clip_by_norm(self, grads: Mapping[str, Tensor], limits: Tensor) -> None:
        """Clip all gradients by their norms, in a few kernel launches on their device."""
        nonempty = [grads[name] for name in self.state.order if name in grads and grads[name].numel()]
        if nonempty:
            clip_stacks(nonempty, limits)

    def _finish(self, unit: Unit) -> None:
        """Handle the end of a unit: callbacks and scheduler steps, and the save if one is due."""
        self.ended(unit)
        if self.plan.saves(unit) and not self.over:
            self.save()


def _warn(name: str, call: str, why: str) -> None:
    warnings.warn(eagerly(name, f"with ({call}), {why}"), stacklevel=2)


def eagerly(name: str, why: str) -> str:
    """Return the warning text for a task that was to be compiled, but runs eagerly."""
    return f"task {name!r} runs eagerly, exact but slower: {why}. hf.Task(compile=False) does so without this warning"


def any_samples(call: str) -> str:
    """Describe a kind of call for any number of samples; a single sample may have another program.

    >>> any_samples("f32[32,64], stacked i64[3,32]"), any_samples("f32[1,64], f32[]")
    ('f32[*,64], stacked i64[3,*]', 'f32[1,64], f32[]')
    """
    return re.sub(r"(stacked \w+\[\d+,|(?<!stacked )\b\w+\[)(?!1\b)\d+", r"\1*", call)


# Decide from estimates whether to compile an array, before its first minibatch, if its task leaves that open.

# Estimated seconds of eager minibatches from which a compilation pays, which takes 5 to 20 s.
LEAST_SECONDS = 20.0


def eager_reason(arrangement: Arrangement, plan: TaskPlan, *, draws: bool = False) -> str:
    """Return why an array runs eagerly; empty if its minibatches are compiled.

    With ``compile=None`` the estimated seconds of all its minibatches decide, once: a switch between minibatches would
    depend on time, and with it the last bits of the results.

    Args:
        draws: forward or the loss draws random numbers, or runs code that may.
    """
    if arrangement.task.compile is False:
        return "compile=False"
    if not plan.resident:
        return f"it is spilled, in {len(plan.shards)} shards, which run one by one"
    if arrangement.task.compile is not None:
        return ""
    array = arrangement.array
    for part in array.compiled(arrangement.minibatch().arguments_for(array)).opaque:
        return f"{part.path or 'forward'} runs in a loop over members: {part.why}"
    if draws:
        # A program draws other numbers than the plain loop.
        return "it may draw random numbers; pass compile=True"
    seconds = plan.steps * plan.step_seconds
    if seconds < LEAST_SECONDS:
        return f"its {plan.steps} steps take about {seconds:.2g} s, too little for a compilation to pay"
    return ""

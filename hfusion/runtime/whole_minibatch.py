"""A resident task whose minibatches are steps of the whole array, with forward and backward in one program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hfusion.core.exclusive import compiling_within
from hfusion.optim.clip import clip_stacks
from hfusion.runtime.copying import Move
from hfusion.runtime.loss_ring import Arrived, LossRing
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

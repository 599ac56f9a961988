"""Resident tasks of one shard: a scheduled unit is a slice of several minibatches, as each decision costs time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch

from hfusion.runtime.process import Gate
from hfusion.runtime.training import Training
from hfusion.schedule.minibatch_slices import Ran, Slices
from hfusion.schedule.plan import Phase, TaskPlan, Unit
from hfusion.schedule.timeline import Span


class SlicedTraining(Training):
    """`Training` of one shard on a CPU. A scheduled unit is a slice, all computed in the slice's backward unit."""

    def __init__(self, *args: Any, slices: Slices) -> None:
        super().__init__(*args)
        self.slices = slices
        self._times: list[Ran] = []
        self._first = 0
        self._saved_at: dict[int, float] = {}

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
        times = [Ran(*(time - began for time in measured)) for measured in self._measured()]
        saved = {step: time - began for step, time in self._saved_at.items()}
        return self.slices.spans(spans, times, self._first, saved)

    def _measured(self) -> Sequence[Ran]:
        """Return when each minibatch ran on its device."""
        return self._times

    def run(self, unit: Unit, device: torch.device, gate: Gate) -> None:
        if unit.phase is Phase.EVALUATE:
            super().run(unit, device, gate)
        elif unit.phase is Phase.BACKWARD:
            end = self.slices.end(unit.step)
            while self.minibatches < end and not self.over:
                self._minibatch(device, gate)

    def update(self, unit: Unit, gate: Gate) -> None:
        """Do nothing: the backward unit of the slice includes the optimizer steps."""

    def _minibatch(self, device: torch.device, gate: Gate) -> None:
        unit, began = self.slices.unit(self.minibatches, Phase.BACKWARD), perf_counter()
        recipe = self._read(self._source, device, gate)
        self._boundary.start_minibatch(dict(zip(recipe.inputs, self._batch.inputs, strict=True)), recipe.makers)
        with gate.computing():
            self._forward(0, device)
            between = perf_counter()
            self._backward(unit, device)
        computed = perf_counter()
        if self.plan.closes(unit.step):
            super().update(unit, gate)
        self._finish_minibatch(unit, began, between, computed)

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

"""Parameters that go through the kernels together, and what is kept of them from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import is_
from typing import TypeAlias

import torch
from torch import Tensor

from hfusion.array import Membership, membership
from hfusion.optim.hyper import Values
from hfusion.optim.rows import Row, RowPlan, Traits
from hfusion.optim.settings import Settings, run_lengths
from hfusion.optim.unit import UnitPlan, unit_places

State: TypeAlias = dict[str, Tensor]
_Key: TypeAlias = tuple[list[int], list[list[int]], bool]

_NATIVE_DEVICES = ("cpu", "cuda")
# Below float32 torch's fused kernels round differently from its default implementation.
_NATIVE_DTYPES = (torch.float32, torch.float64)


class Cohort:
    """Parameters of one device and dtype, all stacked or all shared, whose members have the same step counts.

    ``state``: for each parameter its entry in the optimizer's state, or nothing at all if ``names`` is empty.
    A shared parameter is the row of a single member.
    """

    def __init__(self, params: list[Tensor], state: list[State], names: Sequence[str]) -> None:
        first = params[0]
        self.params = params
        self.stacked = membership_of(first).stacked
        self._device = first.device
        self._counts = _join_counts(state) if state else None
        stacks = [[param.detach() for param in params], *[[entry[name] for entry in state] for name in names]]
        self._stacks = [[self._stack(tensor) for tensor in stack] for stack in stacks]
        self._cut: _Cut | None = None
        contiguous = all(tensor.is_contiguous() for stack in self._stacks for tensor in stack)
        self.native = contiguous and self._device.type in _NATIVE_DEVICES and first.dtype in _NATIVE_DTYPES

    def holds(self) -> bool:
        """Whether nobody but this cohort has written the step counts."""
        return self._counts is None or torch.equal(*self._counts)

    def rows(self, settings: Settings, traits: Traits) -> Iterator[tuple[Row, Values]]:
        """Count a step and give the rows that a kernel shall update, each with its hyper-parameters."""
        members = settings.members if self.stacked else settings.members[:1]
        counts = self._count(settings.advance, len(members))
        steps = {
            count: torch.full((), count, dtype=torch.float32, device=self._device) for count in dict.fromkeys(counts)
        }
        alike = self.stacked and len(steps) == 1
        lengths = settings.lengths if alike else run_lengths(list(zip(members, counts, strict=True)))
        together = alike and settings.unit is not None and self.native and self._device.type == "cpu"
        cut = self._cut
        if cut is None or cut.key != (lengths, settings.used, together):
            cut = self._cut = _Cut(self._stacks, (lengths, settings.used, together), traits)
        grads = self._grads()
        if cut.unit and settings.unit:
            part = [grads[place] for place in cut.small]
            yield cut.unit.load(part, settings, counts[0], steps[counts[0]]), settings.unit
            cut.unit.store()
        if not cut.rows:
            return
        if cut.small:
            grads = [grads[place] for place in cut.large]
        for start, params, part, buffers in cut.rows.load(grads):
            count = counts[start]
            yield Row(params, part, buffers, count, steps[count]), members[start]

    def _grads(self) -> list[Tensor]:
        grads = [self._stack(grad) for param in self.params if (grad := param.grad) is not None]
        # The fused kernels read memory in order, whatever the strides of a gradient say.
        return [grad.contiguous() for grad in grads] if self.native else grads

    def _count(self, advance: Tensor, members: int) -> list[float]:
        if self._counts is None:
            return [0.0] * members
        for tensor in self._counts:
            tensor.add_(advance if self.stacked else advance[0])
        counts: list[float] = self._counts[0][0].reshape(-1).tolist()
        return counts

    def _stack(self, tensor: Tensor) -> Tensor:
        return tensor if self.stacked else tensor.unsqueeze(0)


class _Cut:
    """Which of some stacks go row by row through the kernel, and which with one call for all members."""

    def __init__(self, stacks: Sequence[list[Tensor]], key: _Key, traits: Traits) -> None:
        self.key = key
        lengths, used, together = key
        self.small = unit_places(stacks[0], len(lengths), traits) if together else []
        self.large = [place for place in range(len(stacks[0])) if place not in set(self.small)]
        small, large = ([[stack[i] for i in places] for stack in stacks] for places in (self.small, self.large))
        self.unit = UnitPlan(small, traits) if self.small else None
        self.rows = RowPlan(large, lengths, used) if self.large else None


class Cohorts:
    """The cohorts of one param group, valid while the same tensors lie at the same addresses."""

    def __init__(self, params: Sequence[Tensor], state: list[State], names: list[str]) -> None:
        self._names = names
        alike: dict[object, list[int]] = {}
        for index, param in enumerate(params):
            counts = state[index]["step"].reshape(-1).tolist() if names else []
            key = (membership_of(param).stacked, param.device, param.dtype, tuple(counts))
            alike.setdefault(key, []).append(index)
        self.cohorts = [
            Cohort([params[i] for i in indices], [state[i] for i in indices] if names else [], names)
            for indices in alike.values()
        ]
        self._state = state
        self._tensors = _tensors(params, state)
        # The views in the cohorts keep their storages alive, so an address cannot come back with other
        # contents.
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._shapes = [param.shape for param in params]

    def holds(self, params: Sequence[Tensor], state: Sequence[State | None], names: list[str]) -> bool:
        """Whether these are still the cohorts of ``params`` with ``state``."""
        if names != self._names or not _same(state, self._state):
            return False
        tensors = _tensors(params, self._state)
        return (
            _same(tensors, self._tensors)
            and list(map(Tensor.data_ptr, tensors)) == self._addresses
            and [param.shape for param in params] == self._shapes
            and all(cohort.holds() for cohort in self.cohorts)
        )


def membership_of(param: Tensor, index: int = 0) -> Membership:
    """The mark of ``param``; ValueError if it has none."""
    found = membership(param)
    if found is None:
        raise ValueError(
            f"parameter {index} (shape {list(param.shape)}) belongs to no fused module: pass "
            "fused.parameters(), or "
            "use torch.optim for it"
        )
    return found


def _join_counts(state: Sequence[State]) -> tuple[Tensor, Tensor]:
    """The step counts as one tensor, of which every entry of ``state`` becomes a row, and a copy of it."""
    counts = torch.stack([entry["step"] for entry in state])
    for entry, row in zip(state, counts, strict=True):
        entry["step"] = row
    return counts, counts.clone()


def _same(these: Sequence[object], those: Sequence[object]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))


def _tensors(params: Sequence[Tensor], state: Sequence[State]) -> list[Tensor]:
    return [*params, *chain.from_iterable(entry.values() for entry in state)]

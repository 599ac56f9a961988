"""Parameters that go through the kernels together, and what is kept of them from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_
from typing import TypeAlias

import torch
from torch import Tensor

from hfusion.array import Membership, membership
from hfusion.optim.hyper import Values
from hfusion.optim.rows import Row, RowPlan, Traits
from hfusion.optim.settings import Settings, run_lengths
from hfusion.optim.unit import UnitPlan, unit_pays

State: TypeAlias = dict[str, Tensor]

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
        self._steps = [entry["step"] for entry in state]
        self._counts = torch.stack(self._steps) if state else None
        stacks = [[param.detach() for param in params], *[[entry[name] for entry in state] for name in names]]
        self._stacks = [[self._stack(tensor) for tensor in stack] for stack in stacks]
        self._plan: RowPlan | None = None
        self._unit: UnitPlan | None = None
        contiguous = all(tensor.is_contiguous() for stack in self._stacks for tensor in stack)
        self.native = contiguous and first.device.type in _NATIVE_DEVICES and first.dtype in _NATIVE_DTYPES

    def holds(self) -> bool:
        """Whether nobody but this cohort has written the step counts."""
        return self._counts is None or torch.equal(torch.stack(self._steps), self._counts)

    def rows(self, settings: Settings, traits: Traits) -> Iterator[tuple[Row, Values]]:
        """Count a step and give the rows that a kernel shall update, each with its hyper-parameters."""
        members = settings.members if self.stacked else settings.members[:1]
        counts = self._count(settings.advance, len(members))
        device = self.params[0].device
        steps = {
            count: torch.full((), count, dtype=torch.float32, device=device)
            for count in dict.fromkeys(counts)
        }
        grads = [self._stack(param.grad) for param in self.params if param.grad is not None]
        if settings.unit and len(steps) == 1 and self._unit_pays(settings, traits):
            if self._unit is None:
                self._unit = UnitPlan(self._stacks, traits)
            yield self._unit.load(grads, settings, counts[0], steps[counts[0]]), settings.unit
            self._unit.store()
            return
        known = settings.lengths if self.stacked and len(steps) == 1 else None
        lengths = known or run_lengths(list(zip(members, counts, strict=True)))
        if self._plan is None or self._plan.lengths != lengths:
            self._plan = RowPlan(self._stacks, lengths, traits.tensor_ns)
        plan = self._plan
        rows = plan.load(grads)
        start = 0
        for place, length in enumerate(plan.lengths):
            count = counts[start]
            buffers = [plan.rows[1 + index][place] for index in settings.used[start]]
            yield Row(plan.rows[0][place], rows[place], buffers, count, steps[count]), members[start]
            start += length
        plan.store()

    def _unit_pays(self, settings: Settings, traits: Traits) -> bool:
        pays = self.stacked and self.native and self.params[0].device.type == "cpu"
        return pays and unit_pays(self._stacks[0], len(settings.lengths), traits)

    def _count(self, advance: Tensor, members: int) -> list[float]:
        if self._counts is None:
            return [0.0] * members
        step = advance if self.stacked else advance[0]
        torch._foreach_add_(self._steps, [step] * len(self._steps))
        self._counts.add_(step)
        counts: list[float] = self._counts[0].reshape(-1).tolist()
        return counts

    def _stack(self, tensor: Tensor) -> Tensor:
        return tensor if self.stacked else tensor.unsqueeze(0)


class Cohorts:
    """The cohorts of one param group, valid while the same tensors lie at the same addresses."""

    def __init__(self, params: Sequence[Tensor], state: Sequence[State], names: list[str]) -> None:
        self._names = names
        self._tensors = _tensors(params, state)
        # The views in the cohorts keep their storages alive, so an address cannot come back with other
        # contents.
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._shapes = [param.shape for param in params]
        alike: dict[object, list[int]] = {}
        for index, param in enumerate(params):
            counts = state[index]["step"].reshape(-1).tolist() if names else []
            key = (membership_of(param).stacked, param.device, param.dtype, tuple(counts))
            alike.setdefault(key, []).append(index)
        self.cohorts = [
            Cohort([params[i] for i in indices], [state[i] for i in indices] if names else [], names)
            for indices in alike.values()
        ]

    def holds(self, params: Sequence[Tensor], state: Sequence[State], names: list[str]) -> bool:
        """Whether these are still the cohorts of ``params`` with ``state``."""
        tensors = _tensors(params, state)
        return (
            names == self._names
            and len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and [tensor.data_ptr() for tensor in tensors] == self._addresses
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


def _tensors(params: Sequence[Tensor], state: Sequence[State]) -> list[Tensor]:
    found = [*params]
    for entry in state:
        found.extend(entry.values())
    return found

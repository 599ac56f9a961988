"""Parameters that go through the kernels together, and what is kept of them from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hfusion.core.membership import Membership, membership
from hfusion.device.backend import backend
from hfusion.optim import gpu, native
from hfusion.optim.checks import check_gradient, check_state
from hfusion.optim.hyper import Values
from hfusion.optim.rows import Row, RowPlan
from hfusion.optim.settings import Settings, run_lengths

State: TypeAlias = dict[str, Tensor]


class Plan(Protocol):
    """A kernel of our own for the tensors of a cohort."""

    def move(self, stacks: Sequence[Sequence[Tensor]]) -> None:
        """They lie elsewhere now."""

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Count a step and make it. ``grads``: as the parameters."""


# Our own kernels by type of device; those of any accelerator are Triton's.
PLANS: Mapping[str, Callable[[str, Sequence[Sequence[Tensor]], Tensor | None], Plan | None]] = {"cpu": native.plan}
# Below float32 torch's fused kernels round differently from its default implementation.
_FUSED_DTYPES = (torch.float32, torch.float64)


class Cohort:
    """Parameters of one device and dtype, all stacked or all shared, whose members have the same step counts.

    ``state``: for each parameter its entry in the optimizer's state, or nothing at all if ``names`` is empty.
    ``kernel``: the name of the optimizer's kernel. A shared parameter is the row of a single member.
    ``fused``: whether kernels can read the memory as it lies. ``planned``: whether ``step`` is there for it.
    """

    def __init__(self, params: list[Tensor], state: list[State], names: Sequence[str], kernel: str) -> None:
        first = params[0]
        self.stacked = membership_of(first).stacked
        self._device = first.device
        self._counts = _join_counts(state) if state else None
        self._twice = self._counts.unbind() if self._counts is not None else ()
        self._count = self._counts[0, 0] if self._counts is not None else None
        self._stacks = self._read(params, state, names)
        contiguous = all(tensor.is_contiguous() for stack in self._stacks for tensor in stack)
        self.fused = contiguous and backend(self._device).fuses and first.dtype in _FUSED_DTYPES
        plan = PLANS.get(self._device.type, gpu.plan)
        self._plan = plan(kernel, self._stacks, self._counts) if self.fused else None
        self._rows: tuple[object, RowPlan] | None = None

    def _read(self, params: list[Tensor], state: list[State], names: Sequence[str]) -> list[list[Tensor]]:
        stacks = [[param.detach() for param in params], *[[entry[name] for entry in state] for name in names]]
        return [[self._stack(tensor) for tensor in stack] for stack in stacks]

    def release(self) -> None:
        """Let go of the memory of parameters and state."""
        self._stacks, self._rows = [], None

    def move(self, params: list[Tensor], state: list[State], names: Sequence[str]) -> None:
        """They lie elsewhere now, but are as they were."""
        self._stacks = self._read(params, state, names)
        if self._plan is not None:
            self._plan.move(self._stacks)

    @property
    def planned(self) -> bool:
        return self._plan is not None

    @property
    def twice(self) -> Sequence[Tensor]:
        """The step counts, and again: who else writes them writes the first only. Nothing if there are none."""
        return self._twice

    def holds(self) -> bool:
        """Whether nobody but this cohort has written the step counts."""
        return not self._twice or torch.equal(*self._twice)

    def gradients(self, grads: list[Tensor]) -> list[Tensor]:
        """``grads`` of the parameters as the kernels read them."""
        if not self.stacked:
            grads = [grad.unsqueeze(0) for grad in grads]
        if not self.fused:
            return grads
        # These kernels read memory in order, whatever the strides and the dtype of a gradient say.
        dtype = self._stacks[0][0].dtype
        return [grad if grad.dtype is dtype and grad.is_contiguous() else grad.to(dtype).contiguous() for grad in grads]

    def step(self, grads: list[Tensor], settings: Settings) -> None:
        """Count a step and make it with the kernel of our own. ``grads``: what ``gradients`` gave."""
        assert self._plan is not None
        self._written()
        self._plan.step(grads, settings)

    def rows(self, grads: list[Tensor], settings: Settings) -> Iterator[tuple[Row, Values]]:
        """Count a step and give the rows that a kernel shall update, each with its hyper-parameters."""
        members = settings.members if self.stacked else settings.members[:1]
        self._written()
        if self._counts is not None:
            self._counts.add_(settings.advance if self.stacked else settings.advance[0])
        counts = self._count.reshape(-1).tolist() if self._count is not None else [0.0] * len(members)
        steps = {
            count: torch.full((), count, dtype=torch.float32, device=self._device) for count in dict.fromkeys(counts)
        }
        alike = self.stacked and len(steps) == 1
        lengths = settings.lengths if alike else run_lengths(list(zip(members, counts, strict=True)))
        key = (lengths, settings.used)
        if self._rows is None or self._rows[0] != key:
            self._rows = key, RowPlan(self._stacks, *key)
        for start, params, part, buffers in self._rows[1].load(grads):
            count = counts[start]
            yield Row(params, part, buffers, count, steps[count]), members[start]

    def _written(self) -> None:
        # Autograd sees by the version that a tensor it saved is overwritten; kernels over lists do not count.
        torch.autograd.graph.increment_version(self._stacks[0])

    def _stack(self, tensor: Tensor) -> Tensor:
        return tensor if self.stacked else tensor.unsqueeze(0)


class Cohorts:
    """The cohorts of one param group, valid while the same tensors lie at the same addresses."""

    def __init__(self, params: Sequence[Tensor], state: list[State], names: list[str], kernel: str) -> None:
        self._names = names
        for param, entry in zip(params, state, strict=False):
            check_state(param, membership_of(param), entry, names)
        alike: dict[object, list[int]] = {}
        for index, param in enumerate(params):
            counts = state[index]["step"].reshape(-1).tolist() if names else []
            key = (membership_of(param).stacked, param.device, param.dtype, tuple(counts))
            alike.setdefault(key, []).append(index)
        self._places = list(alike.values())
        self._cohorts = [
            Cohort([params[i] for i in places], [state[i] for i in places] if names else [], names, kernel)
            for places in self._places
        ]
        self._params = list(params)
        self._state = state
        self._steps = [entry.get("step") for entry in state]
        self._look()
        self._traits = _traits(self._tensors)

    def _look(self) -> None:
        """Where everything lies."""
        self._tensors = _tensors(self._params, self._state)
        # The views in the cohorts keep their storages alive, so an address cannot come back with other
        # contents.
        self._addresses = list(map(Tensor.data_ptr, self._tensors))

    def release(self) -> None:
        """Let go of the memory of parameters and state, until ``move``."""
        self._tensors, self._addresses = [], []
        for cohort in self._cohorts:
            cohort.release()

    def move(self, params: Sequence[Tensor], state: Sequence[State | None], names: list[str]) -> bool:
        """After ``release``: look where everything lies now. False if something else has changed about it."""
        if names != self._names or not same_objects(params, self._params) or not same_objects(state, self._state):
            return False
        self._look()
        steps = [entry.get("step") for entry in self._state]
        if not (same_objects(steps, self._steps) and _traits(self._tensors) == self._traits and self._counted()):
            return False
        for cohort, places in zip(self._cohorts, self._places, strict=True):
            cohort.move([self._params[i] for i in places], [self._state[i] for i in places] if names else [], names)
        return True

    def holds(self, params: Sequence[Tensor], state: Sequence[State | None], names: list[str]) -> bool:
        """Whether these are still the cohorts of ``params`` with ``state``."""
        if names != self._names or not same_objects(state, self._state):
            return False
        tensors = _tensors(params, self._state)
        return (
            same_objects(tensors, self._tensors)
            and list(map(Tensor.data_ptr, tensors)) == self._addresses
            and _traits(tensors) == self._traits
            and self._counted()
        )

    def _counted(self) -> bool:
        """Whether nobody else has written step counts."""
        return all(cohort.holds() for cohort in self._cohorts)

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters, then what their state holds."""
        return self._tensors

    @property
    def key(self) -> tuple[int, ...]:
        """Which parameters these are."""
        return tuple(map(id, self._params))

    @property
    def all(self) -> list[Cohort]:
        """The cohorts."""
        return self._cohorts

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return len(self._params)

    def check(self, grads: Sequence[Tensor]) -> None:
        """RuntimeError for a gradient that its parameter cannot have."""
        for param, grad in zip(self._params, grads, strict=True):
            check_gradient(param, membership_of(param), grad)

    def load(self, grads: list[Tensor]) -> list[tuple[Cohort, list[Tensor]]]:
        """Each cohort with its gradients, which are as ``check`` wants them."""
        if len(self._cohorts) == 1:
            return [(self._cohorts[0], self._cohorts[0].gradients(grads))]
        return [
            (cohort, cohort.gradients([grads[place] for place in places]))
            for cohort, places in zip(self._cohorts, self._places, strict=True)
        ]


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


def _join_counts(state: Sequence[State]) -> Tensor:
    """The step counts twice, float32 ``[2, params, ...]``; every entry of ``state`` gets its row of the first.

    They are counted here, wherever and as whatever numbers they were loaded.
    """
    steps = torch.stack([entry["step"].detach().to("cpu", torch.float32) for entry in state])
    counts = torch.stack([steps, steps])
    for entry, row in zip(state, counts[0], strict=True):
        entry["step"] = row
    return counts


def same_objects(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether the entries are the same, one by one."""
    return len(these) == len(those) and all(map(is_, these, those))


def _tensors(params: Sequence[Tensor], state: Sequence[State]) -> list[Tensor]:
    return [*params, *chain.from_iterable(entry.values() for entry in state)]


def _traits(tensors: Sequence[Tensor]) -> list[tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]]:
    """What may change about a tensor, as far as kernels care, besides its address."""
    return [(tensor.dtype, tensor.device, tensor.shape, tensor.stride()) for tensor in tensors]

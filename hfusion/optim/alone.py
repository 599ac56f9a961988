"""The members' own optimizers of torch, on rows of the stacks.

torch rounds after every operation to the dtype of a parameter. So that arrays of half precision and of complex numbers
get the same bits as their members alone, each run of neighbouring members with equal hyper-parameters and step counts
goes through a step of torch's class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import unwrap
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hfusion.optim.formula import Formula
from hfusion.optim.settings import Settings


class AloneStepper:
    """As `hfusion.optim.stacked.StackedStepper`."""

    contiguous = False
    recordable = False

    def __init__(
        self,
        formula: type[Formula],
        names: Sequence[str],
        stacks: Sequence[Sequence[Tensor]],
        numbers: dict[str, list[Tensor]],
    ) -> None:
        assert formula.torch_class is not None
        self._formula, self._names, self._numbers = formula, names, numbers
        self._class: type[Optimizer] = formula.torch_class
        self._members = len(stacks[0][0])
        self.move(stacks)

    def release(self) -> None:
        """Let go of the tensors, until ``move``."""
        self._places: list[tuple[Tensor, ...]] = []

    def move(self, stacks: Sequence[Sequence[Tensor]]) -> None:
        """The same stacks lie elsewhere now."""
        self._places = list(zip(*stacks, strict=True))

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Count a step and make it. ``grads``: as the parameters."""
        for index, ((param, *state), grad) in enumerate(zip(self._places, grads, strict=True)):
            numbers = {name: vectors[index] for name, vectors in self._numbers.items()}
            for start, stop in self._runs(numbers, settings):
                self._update(slice(start, stop), param, grad, state, numbers, settings)

    def _runs(self, numbers: dict[str, Tensor], settings: Settings) -> Iterator[tuple[int, int]]:
        """Members that are alike, and may be one tensor."""
        columns = [vector.tolist() for vector in numbers.values()]
        start = 0
        for _, run in groupby(zip(settings.members[: self._members], *columns, strict=True)):
            length = len(list(run))
            step = length if self._formula.elementwise else 1
            yield from ((first, first + step) for first in range(start, start + length, step))
            start += length

    def _update(
        self,
        rows: slice,
        param: Tensor,
        grad: Tensor,
        state: Sequence[Tensor],
        numbers: dict[str, Tensor],
        settings: Settings,
    ) -> None:
        one = 0 if self._formula.elementwise else rows.start
        where = rows if self._formula.elementwise else one
        row = param.detach()[where]
        row.grad = grad[where]
        used = settings.buffers[rows.start]
        stacks = {name: stack[where] for name, stack in zip(self._names, state, strict=True) if name in used}
        optimizer = self._class([row], **_options(self._formula, settings, rows.start))
        own = optimizer.state[row]
        if numbers and numbers["step"][rows.start] > 0:
            own |= stacks | {name: vector[rows.start].clone() for name, vector in numbers.items()}
        # Without the hooks of whoever watches optimizers: this is a part of one step.
        unwrap(self._class.step)(optimizer)
        for name, stack in stacks.items():
            if own[name] is not stack:
                stack.copy_(own[name])
        for name, vector in numbers.items():
            if name != "step":
                vector[rows] = own[name]
        if numbers:
            numbers["step"][rows] += settings.advance[rows.start]


def _options(formula: type[Formula], settings: Settings, member: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(settings.options, name) for name in formula.options}
    for hyper, value in zip(formula.hypers, settings.members[member], strict=True):
        found[hyper.key] = value if hyper.index is None else (*found.get(hyper.key, ()), value)
    return found

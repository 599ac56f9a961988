"""A formula over whole stacks: what runs an optimizer that has no kernel, or where its kernel cannot be had."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from hfusion.optim.formula import Formula
from hfusion.optim.settings import Settings


class StackedStepper:
    """The steps of ``formula`` for the tensors of a group.

    ``stacks``: the parameters, then each of the ``names``; lists of tensors ``[B, *shape]``. ``numbers``: by name a
    list of vectors ``[B]``, one for each parameter, on the CPU.
    """

    contiguous = False

    def __init__(
        self,
        formula: type[Formula],
        names: Sequence[str],
        stacks: Sequence[Sequence[Tensor]],
        numbers: dict[str, list[Tensor]],
    ) -> None:
        self._formula, self._names, self._numbers = formula, names, numbers
        first = stacks[0][0]
        self._members, self._device = len(first), first.device
        self._dtype = torch.promote_types(_real(first).dtype, torch.float32)
        self.move(stacks)

    def release(self) -> None:
        """Let go of the tensors, until ``move``."""
        self._places: list[tuple[Tensor, ...]] = []

    def move(self, stacks: Sequence[Sequence[Tensor]]) -> None:
        """The same stacks lie elsewhere now."""
        real = [[_real(tensor) for tensor in stack] for stack in stacks]
        self._places = list(zip(*real, strict=True))

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Count a step and make it. ``grads``: as the parameters."""
        scalars = self._scalars(settings)
        for index, ((param, *state), grad) in enumerate(zip(self._places, grads, strict=True)):
            if param.numel():
                self._update(param, _real(grad), state, {name: s[index] for name, s in scalars.items()}, settings)

    def _update(
        self, param: Tensor, grad: Tensor, state: list[Tensor], scalars: dict[str, Tensor | None], settings: Settings
    ) -> None:
        shape = [self._members, *[1] * (param.dim() - 1)]
        own = SimpleNamespace(**{name: None if s is None else s.view(shape) for name, s in scalars.items()})
        these = [tensor.to(self._dtype) for tensor in (param, *state)]
        stacks = dict(zip(self._names, these[1:], strict=True))
        self._formula.update(these[0], grad.to(self._dtype), stacks, own, settings.options)
        for tensor, computed in zip((param, *state), these, strict=True):
            if tensor is not computed:
                tensor.copy_(computed)

    def _scalars(self, settings: Settings) -> dict[str, list[Tensor | None]]:
        """What the update takes of numbers, for each parameter ``[B]``."""
        numbers = {name: torch.stack(vectors) for name, vectors in self._numbers.items()}
        if "step" in numbers:
            numbers["step"] += settings.advance[: self._members]
        count = numbers["step"].double() if "step" in numbers else None
        found = self._formula.scalars(
            settings.vectors_of(self._members), settings.options, SimpleNamespace(**{**numbers, "step": count})
        )
        for name, vectors in self._numbers.items():
            torch._foreach_copy_(vectors, list(numbers[name].unbind()))
        places = len(self._places)
        used = {name: value for name, value in found.items() if value is not None}
        columns: dict[str, list[Tensor | None]] = {name: [None] * places for name in found}
        if used:
            whole = torch.stack([value.expand(places, self._members) for value in used.values()])
            for name, column in zip(used, whole.to(self._device, self._dtype, non_blocking=True), strict=True):
                columns[name] = list(column.unbind())
        return columns


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, as torch's optimizers take them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor

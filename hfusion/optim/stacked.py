"""Run a formula on whole stacks, for optimizers that have no kernel or whose kernel is not available."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from hfusion.core.memory import real_view
from hfusion.optim.device_numbers import DeviceNumbers
from hfusion.optim.formula import Formula
from hfusion.optim.settings import Settings


class StackedStepper:
    """The steps of ``formula`` for the tensors of a group.

    ``stacks``: the parameters, then each of the ``names``; lists of tensors ``[B, *shape]``. ``numbers``: by name a
    list of vectors ``[B]``, one for each parameter, on the CPU.
    """

    contiguous = False
    unrecordable = ""

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
        self._dtype = torch.promote_types(real_view(first).dtype, torch.float32)
        self.release()
        self.move(stacks)

    def release(self) -> None:
        """Drop the references to tensors, until `move` is called."""
        self._parameter_tensors: list[tuple[Tensor, ...]] = []
        self._device_scalars = DeviceNumbers(self._device, self._dtype)
        self._columns: dict[str, list[Tensor | None]] = {}
        self.key: Hashable = None

    def move(self, stacks: Sequence[Sequence[Tensor]]) -> None:
        """Continue with ``stacks``: the same tensors at other addresses."""
        real = [[real_view(tensor) for tensor in stack] for stack in stacks]
        self._parameter_tensors = list(zip(*real, strict=True))

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts and update the tensors. ``grads``: one gradient for each parameter."""
        self.ready(grads, settings)
        self.launch(grads)

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts, and copy the scalars of the step to the device."""
        scalars, count = self._scalars(settings), len(self._parameter_tensors)
        names = [name for name, value in scalars.items() if value is not None]
        # Some options are lists, which cannot be hashed.
        options = tuple(map(repr, settings.options))
        if not names:
            key: Hashable = (options, tuple(scalars))
        else:
            whole = torch.stack([value.expand(count, self._members) for value in scalars.values() if value is not None])
            device_scalars = self._device_scalars.write(whole)
            key = (options, tuple(scalars), tuple(names), device_scalars.data_ptr())
        if key == self.key:
            return
        # Everything that the launches depend on, except the addresses of tensors.
        self.key, self._options = key, settings.options
        self._columns = {name: [None] * count for name in scalars}
        for name, column in zip(names, device_scalars if names else (), strict=True):
            self._columns[name] = list(column.unbind())

    def launch(self, grads: Sequence[Tensor]) -> object:
        """Launch the step; return the objects that must stay alive while the launches may be replayed."""
        for index, ((param, *state), grad) in enumerate(zip(self._parameter_tensors, grads, strict=True)):
            if param.numel():
                self._update(param, real_view(grad), state, {name: s[index] for name, s in self._columns.items()})
        return self._columns

    def _update(self, param: Tensor, grad: Tensor, state: list[Tensor], scalars: dict[str, Tensor | None]) -> None:
        shape = [self._members, *[1] * (param.dim() - 1)]
        views = SimpleNamespace(**{name: None if s is None else s.view(shape) for name, s in scalars.items()})
        converted = [tensor.to(self._dtype) for tensor in (param, *state)]
        stacks = dict(zip(self._names, converted[1:], strict=True))
        self._formula.update(converted[0], grad.to(self._dtype), stacks, views, self._options)
        for tensor, computed in zip((param, *state), converted, strict=True):
            if tensor is not computed:
                tensor.copy_(computed)

    def _scalars(self, settings: Settings) -> Mapping[str, Tensor | None]:
        """Return the scalars of the update, which broadcast to ``[params, B]``; update the numbers of the state."""
        numbers = {name: torch.stack(vectors) for name, vectors in self._numbers.items()}
        if "step" in numbers:
            numbers["step"] += settings.advance[: self._members]
        count = numbers["step"].double() if "step" in numbers else None
        scalars = self._formula.scalars(
            settings.vectors_of(self._members), settings.options, SimpleNamespace(**{**numbers, "step": count})
        )
        for name, vectors in self._numbers.items():
            torch._foreach_copy_(vectors, list(numbers[name].unbind()))
        return scalars

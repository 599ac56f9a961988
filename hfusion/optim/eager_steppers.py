"""Steps without a kernel: of a formula on whole stacks, or of torch's own optimizer classes on rows of the stacks.

torch rounds to the dtype of the parameter after every operation. To give members of half-precision and complex arrays
the same bits as when trained alone, torch's class steps each run of neighbouring members with equal hyper-parameters
and step counts, all their tensors together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from inspect import unwrap
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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


class EagerStepper:
    """Steps by torch's own class; the arguments are those of `StackedStepper`."""

    contiguous = False

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
        first = stacks[0][0]
        self._members = len(first)
        dtype = str(first.dtype).removeprefix("torch.")
        self.unrecordable = (
            f"torch's own {self._class.__name__} steps the members of {dtype} parameters: there is no kernel for them, "
            "or they or their state are not contiguous"
        )
        self.move(stacks)

    def release(self) -> None:
        """Drop the references to tensors, until `move` is called."""
        self._parameter_tensors: list[tuple[Tensor, ...]] = []

    def move(self, stacks: Sequence[Sequence[Tensor]]) -> None:
        """Continue with ``stacks``: the same tensors at other addresses."""
        self._parameter_tensors = list(zip(*stacks, strict=True))

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts and update the tensors. ``grads``: one gradient for each parameter."""
        batches: dict[tuple[int, int], list[int]] = {}
        for index in range(len(self._parameter_tensors)):
            for run in self._runs(index, settings):
                batches.setdefault(run, []).append(index)
        for (start, stop), indices in batches.items():
            for tensors in self._portions(indices, stop - start):
                self._update(slice(start, stop), tensors, grads, settings)

    def _runs(self, index: int, settings: Settings) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each run of members whose rows of tensor ``index`` can be stepped as one."""
        columns = [vectors[index].tolist() for vectors in self._numbers.values()]
        start = 0
        for _, run in groupby(zip(settings.members[: self._members], *columns, strict=True)):
            length = len(list(run))
            step = length if self._formula.elementwise else 1
            yield from ((first, first + step) for first in range(start, start + length, step))
            start += length

    def _portions(self, indices: Sequence[int], members: int) -> Iterator[list[int]]:
        """Split ``indices`` into lists for one torch step each, of about one member's elements to limit temporaries."""
        limit = sum(param.numel() for param, *_ in self._parameter_tensors) // self._members
        portion: list[int] = []
        total = 0
        for index in indices:
            size = self._parameter_tensors[index][0].numel() // self._members * members
            if portion and total + size > limit:
                yield portion
                portion, total = [], 0
            portion.append(index)
            total += size
        yield portion

    def _update(self, rows: slice, indices: Sequence[int], grads: Sequence[Tensor], settings: Settings) -> None:
        """Step the members ``rows`` of the tensors ``indices``; torch's class takes all of them in few launches."""
        where = rows if self._formula.elementwise else rows.start
        params = []
        for index in indices:
            param = self._parameter_tensors[index][0].detach()[where]
            param.grad = grads[index][where]
            params.append(param)
        buffer_names = settings.buffers[rows.start]
        # Constructed with a dummy parameter: some classes, such as Adagrad, create state for their parameters here.
        optimizer = self._class([torch.zeros(1, 1, device="cpu")], **_options(self._formula, settings, rows.start))
        early = bool(optimizer.state)
        optimizer.state.clear()
        optimizer.param_groups[0]["params"] = params
        stacks: list[dict[str, Tensor]] = []
        for index, param in zip(indices, params, strict=True):
            named = zip(self._names, self._parameter_tensors[index][1:], strict=True)
            stacks.append({name: stack[where] for name, stack in named if name in buffer_names})
            numbers = {name: vectors[index][rows.start] for name, vectors in self._numbers.items()}
            if numbers and (early or numbers["step"] > 0):
                optimizer.state[param] |= stacks[-1] | {name: number.clone() for name, number in numbers.items()}
        # Step hooks must not run here, since this is only a part of a step.
        unwrap(self._class.step)(optimizer)
        for index, param, before in zip(indices, params, stacks, strict=True):
            state = optimizer.state[param]
            for name, stack in before.items():
                if state[name] is not stack:
                    stack.copy_(state[name])
            for name, vectors in self._numbers.items():
                if name == "step":
                    vectors[index][rows] += settings.advance[rows.start]
                else:
                    vectors[index][rows] = state[name]


def _options(formula: type[Formula], settings: Settings, member: int) -> dict[str, Any]:
    options: dict[str, Any] = {name: getattr(settings.options, name) for name in formula.options}
    for hyper, value in zip(formula.hypers, settings.members[member], strict=True):
        options[hyper.key] = value if hyper.index is None else (*options.get(hyper.key, ()), value)
    return options

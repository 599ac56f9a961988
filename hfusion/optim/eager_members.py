"""Run torch's own optimizer classes on rows of the stacks.

torch rounds to the dtype of the parameter after every operation. To give members of half-precision and complex arrays
the same bits as when trained alone, torch's class steps each run of neighbouring members with equal hyper-parameters
and step counts, all their tensors together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import unwrap
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hfusion.optim.formula import Formula
from hfusion.optim.settings import Settings


class EagerStepper:
    """Steps by torch's own class; the arguments are those of `hfusion.optim.stacked.StackedStepper`."""

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

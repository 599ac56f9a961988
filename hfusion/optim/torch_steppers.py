"""Steps without a kernel: of a formula on whole stacks, or of torch's own optimizer classes on rows of the stacks."""

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
from hfusion.optim.settings import Options, Settings

# A large tensor is updated in so many pieces, of at least so many elements.
_PIECES, _LEAST_PIECE = 16, 1 << 14


def advance(
    formula: type[Formula], settings: Settings, numbers: Mapping[str, Sequence[Tensor]], shape: tuple[int, int]
) -> Mapping[str, Tensor]:
    """Advance the numbers in the state by one step; return the scalars of this step, float64 by name.

    Args:
        formula: computes the scalars.
        settings: of the param group.
        numbers: by name a list of vectors ``[B]``, one for each parameter, on the CPU; or nothing.
        shape: the number of parameters, and of members.
    """
    params, members = shape
    stacked = {name: torch.stack(list(vectors)) for name, vectors in numbers.items()}
    if "step" in stacked:
        stacked["step"] += settings.advance[:members]
    step = stacked["step"].double() if stacked else torch.zeros(members, dtype=torch.float64, device="cpu")
    n = SimpleNamespace(**{**stacked, "step": step})
    scalars = formula.scalars(settings.vectors_of(members), settings.options, n)
    for name, vectors in numbers.items():
        new = stacked[name] if name == "step" else scalars[name]
        torch._foreach_copy_(list(vectors), list(new.unbind()))
    return {
        name: torch.as_tensor(value, dtype=torch.float64, device="cpu").expand(params, members)
        for name, value in scalars.items()
    }


class StackedStepper:
    """The steps of ``formula`` for the tensors of a group.

    Args:
        formula: what a step computes.
        options: of the param group.
        names: of the state.
        stacks: the parameters, then each of the ``names``; lists of tensors ``[B, *shape]``.
        numbers: by name a list of vectors ``[B]``, one for each parameter, on the CPU.
    """

    contiguous = False
    unrecordable = ""

    def __init__(
        self,
        formula: type[Formula],
        options: Options,
        names: Sequence[str],
        stacks: Sequence[Sequence[Tensor]],
        numbers: Mapping[str, list[Tensor]],
    ) -> None:
        self._formula, self._options, self._names, self._numbers = formula, options, names, numbers
        first = stacks[0][0]
        self._members, self._device = len(first), first.device
        self._dtype = torch.promote_types(real_view(first).dtype, torch.float32)
        self.release()
        self.move(stacks)

    def release(self) -> None:
        """Drop the references to tensors, until `move` is called."""
        self._parameter_tensors: list[tuple[Tensor, ...]] = []
        self._device_scalars = DeviceNumbers(self._device, self._dtype)
        self._scalars: Sequence[Mapping[str, Tensor]] = ()
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
        count = len(self._parameter_tensors)
        scalars = advance(self._formula, settings, self._numbers, (count, self._members))
        written = self._device_scalars.write(torch.stack(list(scalars.values()), dim=1))
        key = (tuple(scalars), written.data_ptr())
        if key != self.key:
            # Everything that the launches depend on, except the addresses of tensors.
            self.key = key
            self._scalars = [dict(zip(scalars, vectors.unbind(), strict=True)) for vectors in written.unbind()]

    def launch(self, grads: Sequence[Tensor]) -> object:
        """Launch the step; return the objects that must stay alive while the launches may be replayed."""
        for tensors, grad, scalars in zip(self._parameter_tensors, grads, self._scalars, strict=True):
            for *piece, piece_grad in self._pieces((*tensors, real_view(grad))):
                self._update(piece, piece_grad, scalars)
        return self._scalars

    def _pieces(self, tensors: tuple[Tensor, ...]) -> Iterator[Sequence[Tensor]]:
        """Yield pieces of the tensors one after the other, so that temporaries are small beside the whole."""
        count = tensors[0].numel()
        if not self._formula.elementwise or not all(map(Tensor.is_contiguous, tensors)):
            yield from [tensors] if count else []
            return
        columns = max(1, max(_LEAST_PIECE, count // _PIECES) // self._members)
        rows = [tensor.view(self._members, -1) for tensor in tensors] if count else []
        yield from zip(*(tensor.split(columns, dim=1) for tensor in rows), strict=True)

    def _update(self, tensors: Sequence[Tensor], grad: Tensor, scalars: Mapping[str, Tensor]) -> None:
        shape = [self._members, *[1] * (grad.dim() - 1)]
        s = SimpleNamespace(**{name: vector.view(shape) for name, vector in scalars.items()})
        param, *stacks = old = [tensor.to(self._dtype) for tensor in tensors]
        state = dict(zip(self._names, stacks, strict=True))
        new, new_state = self._formula.update(param, grad.to(self._dtype), state, s, self._options)
        # Cloned, where a stack becomes what another one was.
        values = [new, *map(new_state.__getitem__, self._names)]
        values = [value.clone() if any(value is tensor for tensor in old) else value for value in values]
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


class MemberLoop:
    """Steps by torch's own class, which rounds half precision as it does for a model alone.

    The arguments are those of `StackedStepper`.
    """

    contiguous = False

    def __init__(
        self,
        formula: type[Formula],
        options: Options,
        names: Sequence[str],
        stacks: Sequence[Sequence[Tensor]],
        numbers: Mapping[str, list[Tensor]],
    ) -> None:
        assert formula.torch_class is not None
        self._formula, self._names, self._numbers = formula, names, numbers
        self._class: type[Optimizer] = formula.torch_class
        self._members = len(stacks[0][0])
        dtype = str(stacks[0][0].dtype).removeprefix("torch.")
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
            self._update(slice(start, stop), indices, grads, settings)

    def _runs(self, index: int, settings: Settings) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each run of members whose rows of tensor ``index`` can be stepped as one."""
        columns = [vectors[index].tolist() for vectors in self._numbers.values()]
        start = 0
        for _, run in groupby(zip(settings.members[: self._members], *columns, strict=True)):
            length = len(list(run))
            step = length if self._formula.elementwise else 1
            yield from ((first, first + step) for first in range(start, start + length, step))
            start += length

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

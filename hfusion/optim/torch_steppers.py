"""Steppers, which update the tensors of a group, and those without a kernel of their own.

They run a formula on whole stacks, torch's own optimizer classes on rows of the stacks, or another stepper.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hfusion.core.memory import real_view
from hfusion.device.backend import DeviceNumbers
from hfusion.optim.formula import Formula
from hfusion.optim.hyper import Settings

# A large tensor is updated in so many pieces, of at least so many elements.
_PIECES, _LEAST_PIECE = 16, 1 << 14


@dataclass(frozen=True, eq=False)
class StepTensors:
    """Tensors of one dtype on one device that a stepper updates.

    Attributes:
        formula: what a step computes.
        options: of the param group.
        names: of the stacks in the state.
        stacks: the parameters, then the stacks of each of the names; lists of tensors ``[B, *shape]``.
        numbers: by name a list of vectors ``[B]``, one for each parameter, on the CPU; empty if no state is kept.
    """

    formula: type[Formula]
    options: Any
    names: Sequence[str]
    stacks: Sequence[Sequence[Tensor]]
    numbers: Mapping[str, list[Tensor]]

    def advance(self, settings: Settings) -> Mapping[str, Tensor]:
        """Advance the numbers in the state by one step; return the scalars of this step, float64 ``[params, B]``."""
        members = len(self.stacks[0][0])
        stacked = {name: torch.stack(list(vectors)) for name, vectors in self.numbers.items()}
        if "step" in stacked:
            stacked["step"] += settings.advance[:members]
        step = stacked["step"].double() if stacked else torch.zeros(members, dtype=torch.float64, device="cpu")
        n = SimpleNamespace(**{**stacked, "step": step})
        hypers = settings.members[0]._make(settings.table[:, :members])
        scalars = self.formula.scalars(hypers, settings.options, n)
        for name, vectors in self.numbers.items():
            new = stacked[name] if name == "step" else scalars[name]
            torch._foreach_copy_(list(vectors), list(new.unbind()))
        return {
            name: torch.as_tensor(value, dtype=torch.float64, device="cpu").expand(len(self.stacks[0]), members)
            for name, value in scalars.items()
        }


class Stepper:
    """Updates the tensors of a group.

    A step is work on the host (`ready`), then launches that are the same every time (`launch`), which can be recorded.

    Attributes:
        contiguous: whether it reads gradients by address, so that they must be contiguous and of the parameters' dtype.
        unrecordable: the reason why its launches cannot be recorded.
        key: everything that the launches depend on, except the addresses of tensors.
    """

    contiguous = False
    unrecordable = ""
    key: Hashable = None

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts, and copy the host's numbers that a step needs to the device.

        ``grads``: one gradient for each parameter.
        """

    def launch(self, grads: Sequence[Tensor]) -> object:
        """Launch the step; return the objects that must stay alive while the launches may be replayed."""


class StackedStepper(Stepper):
    """The steps of a formula in torch, for any tensors."""

    def __init__(self, tensors: StepTensors) -> None:
        self._step = tensors
        stacks = tensors.stacks
        real = [[real_view(tensor) for tensor in stack] for stack in stacks]
        self._members, first = len(stacks[0][0]), real[0][0]
        self._dtype = torch.promote_types(first.dtype, torch.float32)
        self._parameter_tensors = list(zip(*real, strict=True))
        self._device_scalars = DeviceNumbers(first.device, self._dtype)
        self._scalars: Sequence[Mapping[str, Tensor]] = ()

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        scalars = self._step.advance(settings)
        written = self._device_scalars.write(torch.stack(list(scalars.values()), dim=1))
        key = (tuple(scalars), written.data_ptr())
        if key != self.key:
            self.key = key
            self._scalars = [dict(zip(scalars, vectors.unbind(), strict=True)) for vectors in written.unbind()]

    def launch(self, grads: Sequence[Tensor]) -> object:
        for tensors, whole_grad, scalars in zip(self._parameter_tensors, grads, self._scalars, strict=True):
            for *piece, piece_grad in self._pieces((*tensors, real_view(whole_grad))):
                shape = [self._members, *[1] * (piece_grad.dim() - 1)]
                s = SimpleNamespace(**{name: vector.view(shape) for name, vector in scalars.items()})
                param, *stacks = old = [tensor.to(self._dtype) for tensor in piece]
                state = dict(zip(self._step.names, stacks, strict=True))
                grad = piece_grad.to(self._dtype)
                new, new_state = self._step.formula.update(param, grad, state, s, self._step.options)
                # Cloned, where a stack becomes what another one was.
                values = [new, *map(new_state.__getitem__, self._step.names)]
                values = [value.clone() if any(value is tensor for tensor in old) else value for value in values]
                for tensor, value in zip(piece, values, strict=True):
                    tensor.copy_(value)
        return self._scalars

    def _pieces(self, tensors: tuple[Tensor, ...]) -> Iterator[Sequence[Tensor]]:
        """Yield pieces of the tensors one after the other, so that temporaries are small beside the whole."""
        count = tensors[0].numel()
        if not self._step.formula.elementwise or not all(map(Tensor.is_contiguous, tensors)):
            yield from [tensors] if count else []
            return
        columns = max(1, max(_LEAST_PIECE, count // _PIECES) // self._members)
        rows = [tensor.view(self._members, -1) for tensor in tensors] if count else []
        yield from zip(*(tensor.split(columns, dim=1) for tensor in rows), strict=True)


class MemberLoop(Stepper):
    """Steps by torch's own class, one member after the other: it rounds half precision as for a model alone."""

    def __init__(self, tensors: StepTensors) -> None:
        assert tensors.formula.torch_class is not None
        self._class: type[Optimizer] = tensors.formula.torch_class
        self._step = tensors
        columns, names = (*tensors.stacks, *tensors.numbers.values()), (*tensors.names, *tensors.numbers)
        # Each parameter, and its stacks and numbers by name.
        self._states = [(param, dict(zip(names, state, strict=True))) for param, *state in zip(*columns, strict=True)]
        dtype = str(tensors.stacks[0][0].dtype).removeprefix("torch.")
        self.unrecordable = (
            f"torch's own {self._class.__name__} steps the members of {dtype} parameters: there is no kernel for them, "
            "or they or their state are not contiguous"
        )

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        self._settings = settings

    def launch(self, grads: Sequence[Tensor]) -> object:
        settings, formula, numbers = self._settings, self._step.formula, self._step.numbers
        for member, buffers in zip(range(len(self._states[0][0])), settings.buffers, strict=False):
            options: dict[str, Any] = {name: getattr(settings.options, name) for name in formula.options}
            for hyper, value in zip(formula.hypers, settings.members[member], strict=True):
                options[hyper.key] = value if hyper.index is None else (*options.get(hyper.key, ()), value)
            params = [stack.detach()[member] for stack, _ in self._states]
            optimizer = self._class(params, **options)
            # Some classes, such as Adagrad, create state for their parameters here.
            early = bool(optimizer.state)
            states = [{name: state[name][member] for name in (*buffers, *numbers)} for _, state in self._states]
            for param, rows, grad in zip(params, states, grads, strict=True):
                param.grad = grad[member]
                if rows and (early or rows["step"] > 0):
                    # Copies of numbers, since not all classes count.
                    optimizer.state[param] |= {n: row.clone() if n in numbers else row for n, row in rows.items()}
            # Step hooks must not run here, since this is only a part of a step.
            unwrap(self._class.step)(optimizer)
            for param, rows in zip(params, states, strict=True):
                for name, row in rows.items():
                    if name == "step":
                        row.add_(settings.advance[member])
                    elif (new := optimizer.state[param][name]) is not row:
                        row.copy_(new)
        return None


class MasterStepper(Stepper):
    """Steps of half-precision parameters by ``inner``, which steps their master weights.

    Where a parameter is not what its master weights round to, it has been written to: the master weights are then
    read from it, so that loaded, copied and restarted rows need nothing else.

    Args:
        params: stacks ``[B, *shape]`` of bfloat16 or float16.
        masters: the same in float32.
        inner: made for ``masters``.
    """

    def __init__(self, params: Sequence[Tensor], masters: Sequence[Tensor], inner: Stepper) -> None:
        self._params, self._masters, self._inner = list(params), list(masters), inner
        self.unrecordable = inner.unrecordable
        # At the same addresses in every step, which recorded launches read.
        self._gradients = [torch.empty_like(master) for master in masters]

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        self._inner.ready(self._gradients, settings)
        self.key = self._inner.key

    def launch(self, grads: Sequence[Tensor]) -> object:
        torch._foreach_copy_(self._gradients, list(grads))
        for param, master in zip(self._params, self._masters, strict=True):
            # A parameter that was written to is read.
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
        references = self._inner.launch(self._gradients)
        torch._foreach_copy_(self._params, self._masters)
        return references, self._gradients

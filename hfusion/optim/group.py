"""Parameters that are stepped together, and the data kept for them between steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor

from hfusion.core.membership import Membership, membership
from hfusion.device.backend import backend
from hfusion.optim import gpu, native_kernels
from hfusion.optim.checks import check_gradient, check_memory, check_rows, check_state
from hfusion.optim.formula import Formula
from hfusion.optim.master_weights import STACK as MASTER
from hfusion.optim.master_weights import MasterStepper, state_dtype
from hfusion.optim.settings import Options, Settings
from hfusion.optim.torch_steppers import MemberLoop, StackedStepper

State: TypeAlias = dict[str, Tensor]


class Stepper(Protocol):
    """Interface of the objects that update the tensors of a group."""

    @property
    def contiguous(self) -> bool:
        """True if it reads gradients by address, so that they must be contiguous and of the parameters' dtype."""

    @property
    def unrecordable(self) -> str:
        """The reason why its launches cannot be recorded; empty for a `RecordableStepper`."""

    def release(self) -> None:
        """Drop the references to tensors, until `move` is called."""

    def move(self, stacks: Sequence[Sequence[Tensor]]) -> None:
        """Continue with ``stacks``: the same tensors at other addresses."""

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts and update the tensors. ``grads``: one gradient for each parameter."""


class RecordableStepper(Stepper, Protocol):
    """A stepper whose step is work on the host (`ready`), then launches that are the same every time (`launch`)."""

    @property
    def key(self) -> Hashable:
        """Everything that the launches depend on, except the addresses of tensors."""

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts, and copy the host's numbers that a step needs to the device."""

    def launch(self, grads: Sequence[Tensor]) -> object:
        """Launch the step; return the objects that must stay alive while the launches may be replayed."""


Kernels: TypeAlias = Callable[
    [type[Formula], Options, Sequence[str], Sequence[Sequence[Tensor]], Mapping[str, list[Tensor]]], Stepper | None
]

# Kernels by type of device; for types that are not listed, `gpu.plan` uses Triton.
KERNELS: Mapping[str, Kernels] = {"cpu": native_kernels.plan}
# Formulas round these only once, after the update.
_HALVES = (torch.float16, torch.bfloat16)


class Group:
    """Parameters of one device and dtype in a param group, all stacked or all shared.

    ``state``: the entry of each parameter in the optimizer's state; an empty list if no state is kept. ``masters``:
    whether the state also holds master weights. A shared parameter is handled as a stack of one row.
    """

    def __init__(
        self, formula: type[Formula], params: list[Tensor], state: list[State], settings: Settings, masters: bool
    ) -> None:
        names = settings.names
        self._stacked = membership_of(params[0]).stacked
        self._dtype, self._masters = params[0].dtype, masters
        self._stacks = self._read(params, state, names)
        numbers = {name: [self._stack(entry[name]) for entry in state] for name in formula.numbers if state}
        if masters:
            inner = cast(RecordableStepper, _plan(formula, settings.options, names, self._stacks[1:], numbers))
            self._plan: Stepper = MasterStepper(self._stacks[0], self._stacks[1], inner)
        else:
            self._plan = _plan(formula, settings.options, names, self._stacks, numbers)

    def _read(self, params: list[Tensor], state: list[State], names: Sequence[str]) -> list[list[Tensor]]:
        names = [MASTER, *names] if self._masters else names
        stacks = [[param.detach() for param in params], *[[entry[name] for entry in state] for name in names]]
        return [[self._stack(tensor) for tensor in stack] for stack in stacks]

    def release(self) -> None:
        """Drop the references to parameters and state, so that their memory can be freed."""
        self._stacks = []
        self._plan.release()

    def move(self, params: list[Tensor], state: list[State], names: Sequence[str]) -> None:
        """Continue with ``params`` and ``state``, which are unchanged except for their addresses."""
        self._stacks = self._read(params, state, names)
        self._plan.move(self._stacks)

    def gradients(self, grads: list[Tensor]) -> list[Tensor]:
        """Return ``grads``, of any strides and dtype, in the form that the stepper of this group reads."""
        if not self._stacked:
            grads = [grad.unsqueeze(0) for grad in grads]
        if self._dtype.is_complex:
            grads = [grad.resolve_conj() for grad in grads]
        if not self._plan.contiguous:
            return [grad if grad.dtype is self._dtype else grad.to(self._dtype) for grad in grads]
        dtype = self._dtype
        return [grad if grad.dtype is dtype and grad.is_contiguous() else grad.to(dtype).contiguous() for grad in grads]

    def step(self, grads: list[Tensor], settings: Settings) -> None:
        """Increment the step counts and update the parameters. ``grads``: the result of `gradients`."""
        # Autograd detects by version counters that a saved tensor was overwritten; kernels do not increment these.
        torch.autograd.graph.increment_version(self._stacks[0])
        self._plan.step(grads, settings)

    @property
    def recordable(self) -> RecordableStepper | None:
        """The stepper of this group, or None if its launches cannot be recorded."""
        return None if self._plan.unrecordable else cast(RecordableStepper, self._plan)

    @property
    def unrecordable(self) -> str:
        """The reason why launches of its steps cannot be recorded; empty if they can."""
        return self._plan.unrecordable

    @property
    def written(self) -> list[Tensor]:
        """The parameters, as `torch.autograd.graph.increment_version` takes them."""
        return self._stacks[0]

    def _stack(self, tensor: Tensor) -> Tensor:
        return tensor if self._stacked else tensor.unsqueeze(0)


def _plan(
    formula: type[Formula],
    options: Options,
    names: Sequence[str],
    stacks: Sequence[Sequence[Tensor]],
    numbers: dict[str, list[Tensor]],
) -> Stepper:
    """Return the fastest stepper that computes the same as each member's own optimizer would."""
    first = stacks[0][0]
    if all(tensor.is_contiguous() for stack in stacks for tensor in stack) and backend(first.device).fuses:
        stepper = KERNELS.get(first.device.type, gpu.plan)(formula, options, names, stacks, numbers)
        if stepper is not None:
            return stepper
    if first.dtype in _HALVES and formula.torch_class is not None:
        return MemberLoop(formula, options, names, stacks, numbers)
    return StackedStepper(formula, options, names, stacks, numbers)


class Groups:
    """The parameters of one param group by device, dtype, and whether they are stacked.

    Valid while all tensors keep their addresses.
    """

    def __init__(
        self, formula: type[Formula], params: Sequence[Tensor], state: list[State], settings: Settings
    ) -> None:
        names = settings.names
        self._layout = names, settings.options
        dtypes = [state_dtype(param, settings.masters) for param in params]
        for param in params:
            check_memory(param, f"parameter {membership_of(param).name!r}")
            check_rows(param, membership_of(param))
        _own_numbers(formula.numbers, state)
        for param, entry, dtype in zip(params, state, dtypes, strict=False):
            stacks = dict.fromkeys([*names, MASTER] if dtype != param.dtype else names, dtype)
            check_state(param, membership_of(param), entry, stacks, formula.numbers)
        alike: dict[object, list[int]] = {}
        for index, param in enumerate(params):
            alike.setdefault((membership_of(param).stacked, param.device, param.dtype), []).append(index)
        self._group_indices = list(alike.values())
        self._groups = [
            Group(
                formula,
                [params[i] for i in indices],
                [state[i] for i in indices] if state else [],
                settings,
                dtypes[indices[0]] != params[indices[0]].dtype,
            )
            for indices in self._group_indices
        ]
        self._params = list(params)
        self._state = state
        self._numbers = self._found_numbers(formula)
        self._formula = formula
        self._look()
        self._traits = _traits(self._tensors)

    def _found_numbers(self, formula: type[Formula]) -> list[Tensor | None]:
        return [entry.get(name) for entry in self._state for name in formula.numbers]

    def _look(self) -> None:
        """Note all tensors and their current addresses."""
        self._tensors = _tensors(self._params, self._state)
        # The views in the groups keep their storages alive, so an address cannot come back with other
        # contents.
        self._addresses = list(map(Tensor.data_ptr, self._tensors))

    def release(self) -> None:
        """Drop the references to parameters and state, until `move` is called."""
        self._tensors, self._addresses = [], []
        for group in self._groups:
            group.release()

    def move(self, params: Sequence[Tensor], state: Sequence[State | None], settings: Settings) -> bool:
        """Continue at new addresses after `release`. Return False if anything but addresses has changed."""
        names = settings.names
        if (
            (names, settings.options) != self._layout
            or not same_objects(params, self._params)
            or not same_objects(state, self._state)
        ):
            return False
        self._look()
        numbers = self._found_numbers(self._formula)
        if not (same_objects(numbers, self._numbers) and _traits(self._tensors) == self._traits):
            return False
        for group, indices in zip(self._groups, self._group_indices, strict=True):
            group.move([self._params[i] for i in indices], [self._state[i] for i in indices] if state else [], names)
        return True

    def is_valid_for(self, params: Sequence[Tensor], state: Sequence[State | None], settings: Settings) -> bool:
        """Return whether these groups are still valid for ``params`` with ``state``."""
        if (settings.names, settings.options) != self._layout or not same_objects(state, self._state):
            return False
        tensors = _tensors(params, self._state)
        return (
            same_objects(tensors, self._tensors)
            and list(map(Tensor.data_ptr, tensors)) == self._addresses
            and _traits(tensors) == self._traits
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters, then what their state holds."""
        return self._tensors

    @property
    def key(self) -> tuple[int, ...]:
        """The identities of the parameters."""
        return tuple(map(id, self._params))

    @property
    def count(self) -> int:
        """The number of parameters."""
        return len(self._params)

    def check(self, grads: Sequence[Tensor]) -> None:
        """Raise RuntimeError for a gradient that its parameter cannot have."""
        for param, grad in zip(self._params, grads, strict=True):
            check_gradient(param, membership_of(param), grad)

    def with_gradients(self, grads: list[Tensor]) -> list[tuple[Group, list[Tensor]]]:
        """Return each group with its gradients. ``grads`` must be gradients that `check` accepts."""
        if len(self._groups) == 1:
            return [(self._groups[0], self._groups[0].gradients(grads))]
        return [
            (group, group.gradients([grads[index] for index in indices]))
            for group, indices in zip(self._groups, self._group_indices, strict=True)
        ]


def membership_of(param: Tensor, index: int = 0) -> Membership:
    """Return the `Membership` of ``param``. Raises ValueError if it belongs to no fused module."""
    mark = membership(param)
    if mark is None:
        raise ValueError(
            f"parameter {index} (shape {list(param.shape)}) belongs to no fused module: pass "
            "fused.parameters(), or "
            "use torch.optim for it"
        )
    return mark


def common_members(params: Sequence[Tensor]) -> int:
    """Return the number of members of the array that all ``params`` belong to. Raises ValueError if they differ."""
    members = None
    for index, param in enumerate(params):
        mark = membership_of(param, index)
        if members is None:
            members = mark.members
        elif members != mark.members:
            raise ValueError(
                f"parameter {index} ({mark.name!r}) belongs to an array of {mark.members} members, those "
                f"before it to one of {members}: use one optimizer per array"
            )
    if members is None:
        raise ValueError(
            "a param group is empty: leave it out; if a rule such as p.dim() >= 2 chose the groups, it was asked of "
            "stacks [B, *shape], which have one dim more than a member's parameter: let hf.optim.groups(fused, rule) "
            "ask the members' own"
        )
    return members


def _own_numbers(names: Mapping[str, float], state: Sequence[State]) -> None:
    """Copy the numbers of every entry to the CPU, contiguous; ``step`` as float32."""
    addresses: set[int] = set()
    for entry in state:
        for name in names:
            value = entry[name]
            if not isinstance(value, Tensor) or value.is_meta:
                continue
            dtype = torch.float32 if name == "step" else value.dtype
            number = value.detach().to("cpu", dtype).contiguous()
            if number.data_ptr() in addresses:
                number = number.clone()
            addresses.add(number.data_ptr())
            if number.data_ptr() != value.data_ptr():
                entry[name] = number


def same_objects(first: Sequence[object], second: Sequence[object]) -> bool:
    """Return whether two sequences hold the same objects in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))


def _tensors(params: Sequence[Tensor], state: Sequence[State]) -> list[Tensor]:
    return [*params, *chain.from_iterable(entry.values() for entry in state)]


def _traits(tensors: Sequence[Tensor]) -> list[tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]]:
    """Return the properties of tensors, other than addresses, that kernels depend on."""
    return [(tensor.dtype, tensor.device, tensor.shape, tensor.stride()) for tensor in tensors]

"""Hyper-parameters and options of an array: numbers have one float64 value per member, checked at every step."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from hfusion.core.errors import FusionError
from hfusion.torch_private.dispatch_modes import DisableTorchFunctionSubclass

HyperValue: TypeAlias = float | Sequence[float] | torch.Tensor
"""One value for all members, or a sequence or tensor of B values."""


class MemberVector(torch.Tensor):
    """A float64 CPU tensor ``[B]`` that torch's learning rate schedulers drive like a scalar ``lr``.

    They write with ``lr.fill_(value)``; here ``value`` may also be a vector ``[B]``. It pickles as the plain
    tensor, so that ``torch.load(..., weights_only=True)`` reads what was saved.
    """

    def fill_(self, value: Any) -> MemberVector:
        """Write one value, or one per member; a vector of another length is a ValueError."""
        if not (isinstance(value, torch.Tensor) and value.dim()):
            super().fill_(value)
        elif value.shape == self.shape:
            self.copy_(value)
        else:
            raise ValueError(
                f"cannot write {_shape(value)} into a hyper-parameter of {self.numel()} members: "
                "give one value, or one per member"
            )
        return self

    def __float__(self) -> float:
        return float(self.item())

    def item(self) -> Any:
        """The value, if there is one member; FusionError for several."""
        if self.numel() == 1:
            return super().item()
        raise FusionError(
            f"this hyper-parameter holds one value for each of {self.numel()} members, and one number was "
            "asked for: take value.tolist(), and log or compare each member's own (hf.lightning.LightningArray does so "
            "for LearningRateMonitor); of the schedulers, hf.optim.lr_scheduler.ReduceLROnPlateau drives an array"
        )

    def __format__(self, spec: str) -> str:
        """Format each member's value with a format for numbers, as in ``f"{lr:.3e}"``."""
        if not spec:
            return str(self)
        values = [format(value, spec) for value in self.tolist()]
        return values[0] if len(values) == 1 else f"[{', '.join(values)}]"

    def __deepcopy__(self, memo: dict[int, Any]) -> MemberVector:
        memo[id(self)] = copied = self.clone().as_subclass(MemberVector)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def plain(value: Any) -> Any:
    """Return ``value`` with every MemberVector, also in tuples, replaced by a copy that is an ordinary tensor."""
    if isinstance(value, MemberVector):
        return value.as_subclass(torch.Tensor).clone()
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return value


def as_numbers(name: str, value: object) -> torch.Tensor:
    """Return ``value`` as a tensor. Raises ValueError unless it is a number, or a sequence of numbers."""
    try:
        return torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={value!r} is not a number or a sequence of numbers") from error


def member_vector(name: str, value: object, members: int) -> MemberVector:
    """Return ``value`` as a new vector ``[members]``. Raises ValueError unless it is one number or ``members``."""
    tensor = as_numbers(name, value)
    if tensor.dim() and tensor.shape != (members,):
        raise ValueError(
            f"{name} has {_shape(tensor)} for an array of {members} members: give one value, or {members} of them"
        )
    return tensor.expand(members).clone().as_subclass(MemberVector)


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} values" if tensor.dim() <= 1 else f"shape {list(tensor.shape)}"


@dataclass(frozen=True)
class Hyper:
    """A numeric hyper-parameter: its key in the param group, its place in a pair there, and its range."""

    key: str
    index: int | None = None
    low: float = 0.0
    high: float = math.inf
    below: bool = False
    """True: ``high`` itself is out of range."""
    name: str = ""
    """What formulas call it."""

    @property
    def label(self) -> str:
        return self.key if self.index is None else f"{self.key}[{self.index}]"

    def get(self, group: Mapping[str, Any]) -> Any:
        """Return the value in a param group. Raises ValueError if it is one of a pair, and there is no pair."""
        value = group[self.key]
        if self.index is None:
            return value
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise ValueError(f"{self.key}={value!r} is not a pair")
        return value[self.index]

    def put(self, group: MutableMapping[str, Any], value: Any) -> None:
        """Replace the value in a param group."""
        if self.index is None:
            group[self.key] = value
        else:
            group[self.key] = tuple(value if index == self.index else old for index, old in enumerate(group[self.key]))

    def check(self, values: Sequence[float], rows: Sequence[int] | None = None) -> None:
        """Raise a ValueError that names the first member whose value is not finite or out of range.

        ``rows``: the members with these values; by default all.
        """
        fits = partial(operator.gt if self.below else operator.ge, self.high)
        # sum() is not finite if any value is not, also where a NaN hides from min() and max().
        if min(values) >= self.low and fits(max(values)) and math.isfinite(sum(values)):
            return
        if math.isinf(self.low):
            allowed = "finite"
        elif math.isinf(self.high):
            allowed = f"finite and at least {self.low:g}"
        else:
            allowed = f"at least {self.low:g} and {'below' if self.below else 'at most'} {self.high:g}"
        for member, value in zip(rows or range(len(values)), values, strict=True):
            if not (math.isfinite(value) and value >= self.low and fits(value)):
                raise ValueError(f"{self.label} of member {member} is {value}: it must be {allowed}")


def read(
    group: MutableMapping[str, Any], hypers: Sequence[Hyper], members: int
) -> tuple[list[MemberVector], list[list[float]]]:
    """Return the vectors in ``group`` and their values, ``[hyper][member]``; replace other values there by vectors.

    Raises ValueError for values that are not one number, or one per member. :meth:`Hyper.check` checks the range.
    """
    vectors = []
    with DisableTorchFunctionSubclass():
        for hyper in hypers:
            value = hyper.get(group)
            # Cheap, since every step whose hyper-parameters have changed calls this.
            own = type(value) is MemberVector and value.shape == (members,)
            if not (own and value.dtype is torch.float64 and value.is_cpu):
                value = member_vector(hyper.label, value, members)
                hyper.put(group, value)
            vectors.append(value)
        return vectors, [vector.tolist() for vector in vectors]


# The checked hyper-parameters and options of a param group.

ParamGroup: TypeAlias = dict[str, Any]
"""As torch.optim has them."""

State: TypeAlias = dict[str, Tensor]
"""The state of a parameter, by name."""


@dataclass(frozen=True, eq=False)
class Settings:
    """The checked hyper-parameters and options of a param group.

    Attributes:
        vectors: the param group's own.
        options: the formula's ``Options``.
        members: the numbers of each member, the formula's ``Values``.
        buffers: for each member, the names of the state stacks that its update uses.
        counted: whether every member counts its steps, else those that use stacks.
    """

    vectors: Sequence[MemberVector]
    options: Any
    members: Sequence[Any]
    buffers: Sequence[tuple[str, ...]]
    counted: bool

    @cached_property
    def names(self) -> list[str]:
        """The state stacks that some member uses."""
        return list(dict.fromkeys(name for names in self.buffers for name in names))

    @cached_property
    def stateful(self) -> bool:
        """True if some member keeps any state."""
        return self.counted or self.options.master_weights or bool(self.names)

    def has_masters(self, param: Tensor) -> bool:
        """Return whether ``param`` has master weights."""
        return state_dtype(param, self.options.master_weights) != param.dtype

    @cached_property
    def advance(self) -> Tensor:
        """The increments of the step counts: float32 ``[B]``, 1 for members whose steps are counted, else 0."""
        counts = [float(self.counted or bool(names)) for names in self.buffers]
        return torch.tensor(counts, dtype=torch.float32, device="cpu")

    @cached_property
    def table(self) -> Tensor:
        """The hyper-parameters as one float64 tensor ``[hyper, member]``."""
        return torch.tensor(list(zip(*self.members, strict=True)), dtype=torch.float64, device="cpu")


MASTER_WEIGHTS: Final = "master_weights"
"""The option of a param group by which parameters of half precision have weights in float32.

An update of a bfloat16 or float16 parameter that is smaller than half of its last bit is lost. With the option the
state holds each such parameter in float32, which the steps update, and the parameter is what that rounds to
(Micikevicius and others, 2018, "Mixed Precision Training", 3.1).
"""

MASTER_STACK: Final = "master_param"
"""The name of master weights in the state of a parameter."""

HALVES = (torch.bfloat16, torch.float16)


def state_dtype(param: Tensor, masters: bool) -> torch.dtype:
    """Return the dtype of the stacks in the state of ``param``: that of its master weights, if it has them."""
    return torch.float32 if masters and param.dtype in HALVES else param.dtype

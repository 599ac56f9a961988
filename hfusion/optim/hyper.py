"""Hyper-parameters of an array: one float64 value per member, checked when given and at every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

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


def member_vector(name: str, value: object, members: int) -> MemberVector:
    """Return ``value`` as a new vector ``[members]``. Raises ValueError unless it is one number or ``members``."""
    try:
        tensor = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={value!r} is not a number or a sequence of numbers") from error
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
    """What formulas call it, if not ``key``."""

    @property
    def field(self) -> str:
        """The name of the hyper-parameter in formulas."""
        return self.name or self.key

    @property
    def label(self) -> str:
        return self.key if self.index is None else f"{self.key}[{self.index}]"

    def check(self, values: Sequence[float], rows: Sequence[int] | None = None) -> None:
        """Raise a ValueError that names the first member whose value is not finite or out of range.

        ``rows``: the members with these values; by default all.
        """
        # sum() is not finite if any value is not, also where a NaN hides from min() and max().
        if min(values) >= self.low and self._fits_above(max(values)) and math.isfinite(sum(values)):
            return
        for member, value in zip(rows or range(len(values)), values, strict=True):
            if not (math.isfinite(value) and value >= self.low and self._fits_above(value)):
                raise ValueError(f"{self.label} of member {member} is {value}: it must be {self._range()}")

    def _fits_above(self, value: float) -> bool:
        return value < self.high if self.below else value <= self.high

    def _range(self) -> str:
        if math.isinf(self.low):
            return "finite"
        if math.isinf(self.high):
            return f"finite and at least {self.low:g}"
        return f"at least {self.low:g} and {'below' if self.below else 'at most'} {self.high:g}"


def read(
    group: MutableMapping[str, Any], hypers: Sequence[Hyper], members: int
) -> tuple[list[MemberVector], list[list[float]]]:
    """Return the vectors in ``group`` and their values, ``[hyper][member]``; replace other values there by vectors.

    Raises ValueError for values that are not one number, or one per member. :meth:`Hyper.check` checks the range.
    """
    with DisableTorchFunctionSubclass():
        vectors = [_vector(group, hyper, members) for hyper in hypers]
        return vectors, [vector.tolist() for vector in vectors]


def unchanged(
    group: Mapping[str, Any], hypers: Sequence[Hyper], vectors: Sequence[MemberVector], columns: list[list[float]]
) -> bool:
    """Return whether `read` would return the same vectors and values; much cheaper than `read`."""
    with DisableTorchFunctionSubclass():
        for hyper, vector, column in zip(hypers, vectors, columns, strict=True):
            value = group[hyper.key]
            if hyper.index is not None:
                value = value[hyper.index] if type(value) is tuple and len(value) == 2 else None
            if value is not vector or vector.tolist() != column:
                return False
    return True


def _vector(group: MutableMapping[str, Any], hyper: Hyper, members: int) -> MemberVector:
    value = group[hyper.key]
    if hyper.index is None:
        if not _is_vector(value, members):
            value = group[hyper.key] = member_vector(hyper.label, value, members)
        return value  # type: ignore[no-any-return]
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{hyper.key}={value!r} is not a pair")
    if not _is_vector(value[hyper.index], members):
        pair = list(value)
        pair[hyper.index] = member_vector(hyper.label, value[hyper.index], members)
        value = group[hyper.key] = tuple(pair)
    return value[hyper.index]  # type: ignore[no-any-return]


def _is_vector(value: object, members: int) -> bool:
    # The cheapest formulation, since every step calls this.
    return (
        type(value) is MemberVector
        and value.dim() == 1
        and len(value) == members
        and value.dtype is torch.float64
        and value.is_cpu
    )


def copy_vectors(group: MutableMapping[str, Any]) -> None:
    """Copy the vectors in ``group``, so that a write into one group never changes another."""
    for key, value in group.items():
        if isinstance(value, torch.Tensor):
            group[key] = value.clone()
        elif isinstance(value, tuple):
            group[key] = tuple(item.clone() if isinstance(item, torch.Tensor) else item for item in value)

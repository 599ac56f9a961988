"""Layouts of the members' values in one tensor, and conversions between them.

With ``S`` the shape that one member sees and ``B`` the number of members:

========  ==========================  =============================================================
shared    ``S``                       one value for all members
stacked   ``[B, *S]``                 the default
packed    ``[S0, B*S1, *S[2:]]``      members side by side in the channels; grouped convolution, norms
listed    B values of shape ``S``     operators for which a loop over members is fastest
========  ==========================  =============================================================
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Layout(enum.Enum):
    SHARED = "shared"
    STACKED = "stacked"
    PACKED = "packed"
    LISTED = "listed"


class Listed(tuple[Any, ...]):
    """The runtime form of a listed value: one entry per member."""

    __slots__ = ()


def same_value(value: Any, other: Any) -> bool:
    """Return whether two values have the same type and value; NaN equals NaN, and 0.0 differs from -0.0."""
    return value is other or (type(value) is type(other) and repr(value) == repr(other))


def member_values(values: Sequence[Any]) -> Any:
    """Return the value, no tensor, that all members give; if they give different ones, a tuple with one per member."""
    return values[0] if all(same_value(value, values[0]) for value in values) else Listed(values)


def values_of(value: Any, members: int) -> Sequence[Any]:
    """Return the values of all members from what `member_values` gave."""
    return value if isinstance(value, Listed) else [value] * members


def shared_to_stacked(x: Tensor, members: int) -> Tensor:
    """``S -> [B, *S]``; a view."""
    if x.dtype is torch.complex32:
        # Its gradient is a sum over members, which torch has of the real numbers in it only.
        pairs = torch.view_as_real(x.resolve_conj())
        return torch.view_as_complex(pairs.expand(members, *pairs.shape))
    return x.expand(members, *x.shape)


def shared_to_packed(x: Tensor, members: int) -> Tensor:
    """``S -> [S0, B*S1, ...]``; a copy."""
    return x.unsqueeze(1).expand(x.shape[0], members, *x.shape[1:]).flatten(1, 2)


def shared_to_listed(x: Tensor, members: int) -> Listed:
    """``S -> B times S``; no copy."""
    return Listed([x] * members)


def stacked_to_packed(x: Tensor, members: int) -> Tensor:
    """``[B, N, C, ...] -> [N, B*C, ...]``; a view where the strides allow."""
    return x.movedim(0, 1).flatten(1, 2)


def stacked_to_listed(x: Tensor, members: int) -> Listed:
    """``[B, *S] -> B times S``; views, with one stack in backward."""
    return Listed(x.unbind(0))


def packed_to_stacked(x: Tensor, members: int) -> Tensor:
    """``[N, B*C, ...] -> [B, N, C, ...]``; a view."""
    return x.view(x.shape[0], members, x.shape[1] // members, *x.shape[2:]).movedim(1, 0)


def packed_to_listed(x: Tensor, members: int) -> Listed:
    """``[N, B*C, ...] -> B times [N, C, ...]``; views."""
    return Listed(x.chunk(members, 1))


def listed_to_stacked(x: Listed, members: int) -> Tensor:
    """``B times S -> [B, *S]``; a copy."""
    return torch.stack([*x])


def listed_to_packed(x: Listed, members: int) -> Tensor:
    """``B times [N, C, ...] -> [N, B*C, ...]``; a copy."""
    return torch.cat([*x], 1)


Conversion = Callable[[Any, int], Any]

CONVERSIONS: dict[tuple[Layout, Layout], Conversion] = {
    (Layout.SHARED, Layout.STACKED): shared_to_stacked,
    (Layout.SHARED, Layout.PACKED): shared_to_packed,
    (Layout.SHARED, Layout.LISTED): shared_to_listed,
    (Layout.STACKED, Layout.PACKED): stacked_to_packed,
    (Layout.STACKED, Layout.LISTED): stacked_to_listed,
    (Layout.PACKED, Layout.STACKED): packed_to_stacked,
    (Layout.PACKED, Layout.LISTED): packed_to_listed,
    (Layout.LISTED, Layout.STACKED): listed_to_stacked,
    (Layout.LISTED, Layout.PACKED): listed_to_packed,
}

COPYING: frozenset[Conversion] = frozenset({shared_to_packed, listed_to_stacked, listed_to_packed, stacked_to_packed})


def lift(x: Tensor, rank: int) -> Tensor:
    """Give a stacked value singleton dims behind the member dim until a member sees ``rank`` dims; a view."""
    missing = rank + 1 - x.dim()
    return x.view(x.shape[0], *(1,) * missing, *x.shape[1:]) if missing > 0 else x


def lift_packed(x: Tensor, rank: int) -> Tensor:
    """Per-member channels ``[B, C, *rest]`` (a stacked value) as packed, broadcastable ``[B*C, *rest]``; a view.

    ``rank`` is that of the packed partner: the stacked value's own dims are its channels and what follows them.
    """
    flat = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return flat.view(flat.shape[0], *(1,) * (rank - 1 - flat.dim()), *flat.shape[1:])

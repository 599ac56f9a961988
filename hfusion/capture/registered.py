"""What forward may do to its parameters and buffers: all that a stack of them can follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfusion.capture.named import tensors, ties
from hfusion.core.errors import FusionError

REMEDY = (
    "keep state in a registered buffer, hand out results by return, and call the models once before they are fused "
    "where only a first call is another"
)


@dataclass(frozen=True)
class Registered:
    """The parameters and buffers of a member before a call, and which of them are one tensor or share memory."""

    named: dict[str, Tensor]
    ties: dict[str, str]
    shared: frozenset[tuple[str, str]]

    @staticmethod
    def of(member: nn.Module) -> Registered:
        named = dict(tensors(member))
        return Registered(named, ties(named), _shared_memory(named))


def _shared_memory(named: Mapping[str, Tensor]) -> frozenset[tuple[str, str]]:
    """Pairs of names whose tensors share memory."""
    first: dict[int, str] = {}
    held = {name: t.untyped_storage().data_ptr() for name, t in named.items() if t.layout is torch.strided}
    return frozenset((first.setdefault(place, name), name) for name, place in held.items() if place)


def check_registered(module: nn.Module, before: Registered, member: nn.Module) -> None:
    """Raise a FusionError for what forward did to tensors that a stack cannot follow."""
    now, originals = dict(tensors(member)), dict(tensors(module))
    for name in {**now, **before.named}:
        if name not in now or name not in before.named:
            verb = "registers" if name in now else "takes away"
            raise FusionError(
                f"forward {verb} the tensor {name}; call each model once before fusing (where a function makes the "
                "models, in that function), or let __init__ do so, or keep a table as an attribute"
            )
        old, new = before.named[name], now[name]
        for flag in ("shape", "dtype", "device", "requires_grad"):
            a, b = getattr(originals[name], flag), getattr(new, flag)
            if a != b and not (flag == "requires_grad" and not isinstance(old, nn.Parameter)):
                raise FusionError(
                    f"forward changes {flag} of {name} from {a} to {b}, where an array has one stack for all calls; "
                    "call each model once before fusing, or keep a table that grows as an attribute, not as a buffer"
                )
    _check_ties(before, ties(now))
    for first, second in _shared_memory(now) - before.shared:
        if first != second:
            raise FusionError(f"forward makes {first} and {second} share memory; assign a clone() to one of them")
    for name, _ in module.named_parameters():
        if now[name] is not before.named[name]:
            raise FusionError(
                f"forward makes {name} another parameter, which no optimizer knows; write into it under torch.no_grad()"
            )


def _check_ties(before: Registered, now: Mapping[str, str]) -> None:
    """Raise where names of one tensor, of which an array has one stack, have become names of two."""
    for name, first in before.ties.items():
        if now.get(name) != first:
            raise FusionError(
                f"{first} and {name} are one tensor, and forward makes them two by assigning one of them anew; write "
                "into it, or untie them before fusing: assign a clone(), or call the models once"
            )

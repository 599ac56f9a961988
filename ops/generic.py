"""The generic ways to batch an operator that has no rule of its own: vmap of the one operator, else a loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from hfusion.core.layout import Layout
from hfusion.core.tree import contains
from hfusion.ops.rule import (
    Call,
    Operand,
    Scalar,
    Site,
    Value,
    has_per_member,
    in_order,
    is_random,
    loop,
    map_values,
    values,
)
from hfusion.torch_private.dispatch_modes import FakeTensorMode, vmap_fallback_refused


def generic(site: Site, arguments: Mapping[str, Any]) -> Call:
    """``site`` by `torch.vmap` where vmap has a true batching rule for it, by a loop over members otherwise."""
    listed = any(v.layout is Layout.LISTED for v in values(arguments))
    if listed or is_random(site.target, arguments) or has_per_member(arguments):
        return loop(site, arguments)
    args, kwargs = in_order(site, map_values(arguments, lambda v: v if v.shared else v.to(Layout.STACKED)))
    items = (*args, *kwargs.values())
    how = (site.target, tuple(map(_batched, items)), len(args), tuple(kwargs))
    # Whether vmap has a batching rule for the operator is found by one run on fake tensors of the same shapes.
    with FakeTensorMode(), vmap_fallback_refused():
        try:
            vmapped(*how, *(_stand_in(item, site.members) for item in items))
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            return loop(site, arguments)
    return site.call(vmapped, (*how, *items), Layout.STACKED, "vmap")


def vmapped(
    target: OpOverload, batched: tuple[Any, ...], positional: int, names: tuple[str, ...], *arguments: Any
) -> Any:
    """``target`` under `torch.vmap`; ``batched`` is 0 for each stacked tensor in the nest of arguments."""

    def single(*row: Any) -> Any:
        return target(*row[:positional], **dict(zip(names, row[positional:], strict=True)))

    return torch.vmap(single, in_dims=batched)(*arguments)


def _batched(argument: Any) -> Any:
    """Return the dim of the members for `torch.vmap`: 0 for a stacked operand, None for all else, nested like lists."""
    if isinstance(argument, list | tuple) and contains(argument, Operand):
        return type(argument)(_batched(item) for item in argument)
    return 0 if isinstance(argument, Operand) else None


def _stand_in(argument: Any, members: int) -> Any:
    if isinstance(argument, list | tuple):
        return type(argument)(_stand_in(item, members) for item in argument)
    if isinstance(argument, Scalar):
        return _concrete(argument.example)
    if isinstance(argument, Value | Operand):
        example = argument.example if isinstance(argument, Value) else argument.value.example
        stacked = (members,) if isinstance(argument, Operand) else ()
        shape = (*stacked, *(_concrete(size) for size in example.shape))
        return torch.empty(shape, dtype=example.dtype, device=example.device)
    return argument


def _concrete(number: Any) -> Any:
    """A number that varies as it was at capture, so that the trial adds no guard."""
    return number.node.hint if isinstance(number, torch.SymInt) else number

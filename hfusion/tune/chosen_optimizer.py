"""Optimizers chosen by a space: their class, the options of an array, and the hyper-parameters of its members."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from hfusion import optim
from hfusion.core.membership import Membership, mark
from hfusion.optim import FusedOptimizer
from hfusion.optim.optimizer_rows import explicit_everywhere, groups_taking

MakeOptimizer: TypeAlias = Callable[[Any], FusedOptimizer]

_KINDS: dict[str, type[FusedOptimizer]] = {
    name.lower(): kind
    for name in optim.__all__
    if isinstance(kind := getattr(optim, name), type)
    and issubclass(kind, FusedOptimizer)
    and kind is not FusedOptimizer
}


def optimizer_of(choice: Any) -> MakeOptimizer:
    """Return the optimizer that a space names: ``"adam"``, ``hf.optim.Adam``, ``torch.optim.Adam``, or a function.

    Raises:
        ValueError: hf.optim has no optimizer of this name or class.
    """
    if isinstance(choice, str):
        if choice.lower() not in _KINDS:
            raise ValueError(f"optimizer={choice!r} is no optimizer of hf.optim; it has {', '.join(_KINDS)}")
        return _KINDS[choice.lower()]
    if (
        isinstance(choice, type)
        and issubclass(choice, torch.optim.Optimizer)
        and not issubclass(choice, FusedOptimizer)
    ):
        kinds = [kind for kind in _KINDS.values() if kind.torch_class is choice]
        if not kinds:
            raise ValueError(f"optimizer={choice.__name__} has no counterpart in hf.optim; it has {', '.join(_KINDS)}")
        return kinds[0]
    if not callable(choice):
        raise ValueError(f"optimizer={choice!r}: give a name such as 'adam', a class of hf.optim, or a function")
    make: MakeOptimizer = choice
    return make


def sample_optimizer(
    optimizer: MakeOptimizer, options: Mapping[str, Any] | None = None, hypers: Sequence[Mapping[str, Any]] = ()
) -> FusedOptimizer:
    """Return the optimizer of one member on the meta device. Raises ValueError if it is not from hf.optim.

    The options and hyper-parameters are written as by `optimizer_with`, except where param groups that are chosen by
    the names of a model's parameters would take them.
    """
    params = [nn.Parameter(torch.empty(1, *shape, device="meta")) for shape in ((1, 1), (1,))]
    for param in params:
        mark(param, Membership("weight", 1, True))
    sample = optimizer(params)
    if not isinstance(sample, FusedOptimizer):
        raise ValueError(
            f"optimizer gave {type(sample).__name__}: give a class of hf.optim, or a function that makes one from "
            "parameters, such as lambda params: hf.optim.SGD(params, momentum=0.9)"
        )
    _write(sample, options or {}, hypers)
    return sample


def optimizer_with(
    optimizer: MakeOptimizer, options: Mapping[str, Any], hypers: Sequence[Mapping[str, Any]]
) -> MakeOptimizer:
    """Return a function that makes the optimizer with the options of an array and hyper-parameters of its members.

    hypers: the hyper-parameters of each member, or one mapping for all members. Options may depend on them, as nesterov
    needs momentum. Missing values keep the optimizer's defaults, and a param group keeps what it was given itself. The
    function raises ValueError for a value that no param group takes.
    """

    def make_optimizer(params: Any) -> FusedOptimizer:
        created = optimizer(params)
        if isinstance(created, FusedOptimizer) and (unused := _write(created, options, hypers)):
            raise ValueError(explicit_everywhere(created, unused[0]))
        return created

    return make_optimizer


def _write(optimizer: FusedOptimizer, options: Mapping[str, Any], hypers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write options and hyper-parameters as the optimizer's defaults; return the keys that no param group takes."""
    keys = dict.fromkeys([*options, *(key for member in hypers for key in member)])
    for key in keys:
        for group in groups_taking(optimizer, key):
            values = [member.get(key) for member in hypers]
            group[key] = options[key] if key in options else _values(group[key], values)
    return [key for key in keys if not groups_taking(optimizer, key)]


def _values(defaults: Any, values: Sequence[Any]) -> Any:
    """Return one hyper-parameter per member, or one for all, with defaults in place of None. Betas are a pair."""
    if isinstance(defaults, tuple):
        columns = [[None if value is None else value[index] for value in values] for index in range(len(defaults))]
        return tuple(_values(default, column) for default, column in zip(defaults, columns, strict=True))
    if len(values) == 1:
        return defaults if values[0] is None else values[0]
    return [
        default if value is None else float(value) for default, value in zip(defaults.tolist(), values, strict=True)
    ]

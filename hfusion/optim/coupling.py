"""Checks of optimizers from outside hf.optim over an array: refuse those that couple the members.

An optimizer that updates every element of a tensor independently trains a stack as it trains its members. One that
computes with several elements, such as a norm of the tensor, mixes the members as if they were parts of one model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import any_absent, frozen_rows
from hfusion.core.membership import Membership, membership
from hfusion.optim.param_groups import split_by_stack_dims
from hfusion.torch_private.module_hooks import count_global_step_hooks, has_step_hooks, spare_dynamo

# tests/optim/test_coupling.py trains with each of them. SparseAdam refuses dense gradients by itself.
_ELEMENTWISE = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    }
)
_COUPLING: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "finds one direction and one step length for all elements of all tensors",
    torch.optim.Adafactor: "scales a step by norms over a whole tensor",
    torch.optim.Muon: "orthogonalises a whole matrix",
}
# What implementations of sharpness-aware minimization have in common: the norm in their first step is over all members.
_SAM = ("first_step", "second_step")
_REMEDY = "give each member an optimizer of its own, as docs/forward.md shows, or take one of hf.optim"


def check(optimizer: Any) -> None:
    """Raise a FusionError if ``optimizer`` would couple the members of an array; warn if that is not known.

    ``optimizer``: of torch.optim, or anything else that has param groups.
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE or getattr(optimizer, "keeps_members_apart", False):
        return
    stack = next((mark for _, mark in _marked(optimizer) if mark.stacked and mark.members > 1), None)
    if stack is None:
        return
    name = f"{kind.__module__.removesuffix('.' + kind.__name__.lower())}.{kind.__qualname__}"
    where = f"parameter {stack.name!r} holds {stack.members} members"
    for coupling_kind, why in _COUPLING.items():
        if isinstance(optimizer, coupling_kind):
            raise FusionError(f"{name} {why}, and {where}, which it would couple; {_REMEDY}")
    if all(hasattr(optimizer, method) for method in _SAM):
        raise FusionError(f"{name} scales a step by one norm over all tensors, and {where}: {_REMEDY}")
    _warn_once(
        f"{name} is not known to hfusion, and {where}: it is right only if it treats every element by itself; if not, "
        f"{_REMEDY}",
    )


def _check_frozen(optimizer: Optimizer) -> None:
    """Raise FusionError if some members do not train a parameter: torch's optimizers would still change their rows."""
    if not any_absent() or getattr(optimizer, "leaves_rows_alone", False):
        return
    for param, mark in _marked(optimizer):
        if (frozen := frozen_rows(param)) is not None:
            raise FusionError(
                f"members {frozen.nonzero().reshape(-1).tolist()} do not train {mark.name!r}, and others do: "
                f"{type(optimizer).__name__} would move their rows by momentum and weight decay; take the one of that "
                "name in hf.optim, or give each member an optimizer of its own, over fused[i].parameters()"
            )


@cache
def _warn_once(text: str) -> None:
    """Warn once in this process."""
    warnings.warn(text, stacklevel=2)


def hooks() -> int:
    """Return the number of global optimizer hooks of torch that this module has registered."""
    return watch.cache_info().currsize


def has_hooks(optimizer: Optimizer) -> bool:
    """Return whether step hooks run for ``optimizer`` other than those of this module."""
    return has_step_hooks(optimizer) or count_global_step_hooks() > hooks()


@cache
def watch() -> Any:
    """Check every optimizer of this process right before its steps, by torch's global hook."""
    spare_dynamo()
    return register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _check_frozen(optimizer)
    check(optimizer)


def check_groups(optimizer: Optimizer) -> None:
    """Warn if the param groups look as if a rule for one model had chosen them by the dims of stacks."""
    why = split_by_stack_dims(optimizer.param_groups)
    if why:
        _warn_once(f"{type(optimizer).__name__}: {why}; let hf.optim.groups(fused, rule) ask the members' own")


def _marked(optimizer: Any) -> Iterator[tuple[Tensor, Membership]]:
    """Yield the parameters of ``optimizer`` that belong to arrays."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, Tensor) and (mark := membership(param)) is not None:
                yield param, mark

"""Optimizers of others over an array: which of them keep the members apart, and a refusal of those that do not.

An optimizer that treats every element of a tensor by itself trains a stack as it trains its members. One that computes
with several elements, such as a norm of the tensor, takes the members for parts of one model.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hfusion.core.errors import FusionError
from hfusion.core.membership import Membership, membership

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
_REMEDY = "give each member an optimizer of its own, as docs/what-couples-members.md shows, or take one of hf.optim"


def check(optimizer: Optimizer) -> None:
    """FusionError if ``optimizer`` would couple the members of an array; a warning if that is not known."""
    kind = type(optimizer)
    if kind in _ELEMENTWISE or getattr(optimizer, "keeps_members_apart", False):
        return
    found = _first_stack(optimizer)
    if found is None:
        return
    name = f"{kind.__module__.removesuffix('.' + kind.__name__.lower())}.{kind.__qualname__}"
    where = f"parameter {found.name!r} holds {found.members} members"
    for known, why in _COUPLING.items():
        if isinstance(optimizer, known):
            raise FusionError(f"{name} {why}, and {where}, which it would couple; {_REMEDY}")
    if name not in _warned:
        _warned.add(name)
        told = f"{name} is not known to hfusion, and {where}: it is right only if it treats every element by itself"
        # check, the hook, torch's wrapper of step, and who called it.
        warnings.warn(f"{told}; if not, {_REMEDY}", stacklevel=4)


_warned: set[str] = set()


def watch() -> None:
    """From now on `check` every optimizer of this process that steps."""
    _hook()


def hooks() -> int:
    """How many hooks of torch's optimizers are ours."""
    return _hook.cache_info().currsize


@cache
def _hook() -> Any:
    return register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: check(optimizer))


def _first_stack(optimizer: Optimizer) -> Membership | None:
    """A parameter of ``optimizer`` that belongs to several members."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            found = membership(param) if isinstance(param, Tensor) else None
            if found is not None and found.stacked:
                return found
    return None

"""Optimizers and rules that are written for one model, over the stacks of an array.

Optimizers from outside hf.optim that couple the members are refused; `groups` asks a rule about each member's own
parameters.
An optimizer that updates every element of a tensor independently trains a stack as it trains its members. One that
computes with several elements, such as a norm of the tensor, mixes the members as if they were parts of one model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SparseAdam
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import any_absent, frozen_rows
from hfusion.core.membership import Membership, has_rows, keep_marks, membership
from hfusion.optim.hyper import plain
from hfusion.torch_private.module_hooks import count_global_step_hooks, has_step_hooks, spare_dynamo

# tests/optim/test_coupling.py trains with each of them. SparseAdam refuses dense gradients by itself.
_ELEMENTWISE = frozenset((ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SparseAdam))
_COUPLING: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "finds one direction and one step length for all elements of all tensors",
    torch.optim.Adafactor: "scales a step by norms over a whole tensor",
    torch.optim.Muon: "orthogonalises a whole matrix",
}
# What implementations of sharpness-aware minimization have in common: the norm in their first step is over all members.
_SAM = ("first_step", "second_step")
_REMEDY = "give each member an optimizer of its own, as docs/tools.md shows, or take one of hf.optim"


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
        f"{_REMEDY}"
    )


@cache
def _warn_once(text: str) -> None:
    """Warn once in this process."""
    warnings.warn(text, stacklevel=2)


def has_hooks(optimizer: Optimizer) -> bool:
    """Return whether step hooks run for ``optimizer`` other than those of this module."""
    return has_step_hooks(optimizer) or count_global_step_hooks() > watch.cache_info().currsize


@cache
def watch() -> Any:
    """Check every optimizer of this process right before its steps, by torch's global hook."""
    spare_dynamo()
    return register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise FusionError if members are coupled, or some do not train a parameter, which torch's would still change."""
    if any_absent() and not getattr(optimizer, "leaves_rows_alone", False):
        for param, mark in _marked(optimizer):
            if (frozen := frozen_rows(param)) is not None:
                raise FusionError(
                    f"members {frozen.nonzero().reshape(-1).tolist()} do not train {mark.name!r}, and others do: "
                    f"{type(optimizer).__name__} would move their rows by momentum and weight decay; take the one of "
                    "that name in hf.optim, or give each member an optimizer of its own, over fused[i].parameters()"
                )
    check(optimizer)


def _marked(optimizer: Any) -> Iterator[tuple[Tensor, Membership]]:
    """Yield the parameters of ``optimizer`` that belong to arrays."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, Tensor) and (mark := membership(param)) is not None:
                yield param, mark


# Param groups of an array, chosen parameter by parameter as for one model.


class AskedParams(list[nn.Parameter]):
    """Parameters of a group that was chosen by a rule for members' own parameters, not by the shape of stacks."""


def groups(
    fused: nn.Module | Iterable[nn.Parameter], rule: Callable[[str, nn.Parameter], Mapping[str, Any] | None]
) -> list[dict[str, Any]]:
    """Return param groups of an array for a rule that is written for the parameters of one model.

    A stack ``[B, *shape]`` has one dim more than the parameter of a member, so that a rule such as ``p.dim() >= 2``
    over ``fused.parameters()`` takes biases for matrices. Here ``rule`` is asked about each member's row.

    Args:
        fused: what hf.fuse or hf.build returned, or parameters of it, as hf.Population and hf.sweep give them to the
            function that makes their optimizer.
        rule: called with the name and a parameter that holds the values of a member. Returns the options of its param
            group, ``{}`` for the optimizer's defaults, None to leave the parameter out. Numbers may differ between the
            members of a parameter; an optimizer of hf.optim then has one value for each.

    Returns:
        Param groups for an optimizer of hf.optim, or of torch.optim where no option differs between members.

    Raises:
        FusionError: the members' options differ in something that an array has once, or members are left out.

    Example:
        >>> import hfusion as hf, torch
        >>> fused = hf.build(lambda: torch.nn.Linear(3, 2), seeds=[0, 1])
        >>> decay = lambda name, p: {"weight_decay": 0.1 if p.dim() >= 2 else 0.0}
        >>> [(len(group["params"]), group["weight_decay"]) for group in hf.optim.groups(fused, decay)]
        [(1, 0.1), (1, 0.0)]
    """
    param_groups: list[dict[str, Any]] = []
    if isinstance(fused, nn.Module) and not hasattr(fused, "origin"):
        raise FusionError(f"hf.optim.groups expects what hf.fuse or hf.build returned, got {type(fused).__name__}")
    for stack in fused.parameters() if isinstance(fused, nn.Module) else fused:
        mark = membership(stack)
        if mark is None:
            raise FusionError(f"hf.optim.groups got a parameter of shape {list(stack.shape)} that belongs to no array")
        answers: list[Any] = []
        for member, row in enumerate(stack.detach() if mark.stacked else [stack.detach()] * mark.members):
            parameter = nn.Parameter(row, requires_grad=stack.requires_grad)
            keep_marks(parameter, stack)
            answers.append(answer := rule(mark.name, parameter))
            if answer is not None and not isinstance(answer, Mapping):
                raise FusionError(
                    f"the rule returned {type(answer).__name__} for {mark.name!r} of member {member}: it must return "
                    'the options of a param group, such as {"weight_decay": 0.0}, or None'
                )
            if (answer is None) != (answers[0] is None) or set(answer or ()) != set(answers[0] or ()):
                raise FusionError(
                    f"the rule returned {answer!r} for {mark.name!r} of member {member} and {answers[0]!r} for that of "
                    "member 0: an array has one stack of it, so give the same options for all members; their numbers "
                    "may differ"
                )
        if answers[0] is None:
            continue
        options = {key: _joined(f"{key!r} of {mark.name!r}", [a[key] for a in answers]) for key in answers[0]}
        group = next((g for g in param_groups if g == {"params": g["params"], **options}), None)
        if group is None:
            param_groups.append(group := {"params": AskedParams(), **options})
        group["params"].append(stack)
    return param_groups


def _joined(label: str, values: Sequence[Any]) -> Any:
    """Return the value if all members have the same, otherwise one value per member. Raises FusionError."""
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return list(values)
    if all(isinstance(value, tuple | list) and len(value) == len(values[0]) for value in values):
        return tuple(_joined(label, column) for column in zip(*values, strict=True))
    raise FusionError(f"{label} differs between the members, {list(values)}: only numbers may differ within an array")


def check_groups(optimizer: Optimizer) -> None:
    """Warn if the param groups look as if a rule for one model had chosen them by the dims of stacks.

    So does ``p.dim() >= 2``, for decay: all stacks but those of single numbers have two dims, so that biases are in the
    group of matrices, and the group of the others holds single numbers only. An empty one is an error.
    """

    def options(group: dict[str, Any]) -> str:
        return str({k: plain(v) for k, v in group.items() if k not in ("params", "param_names")})

    groups = optimizer.param_groups
    for index, group in enumerate(groups):
        if not all(has_rows(p) and p.dim() == 1 for p in group["params"]):
            continue
        for rest in groups:
            dims = {p.dim() for p in rest["params"] if has_rows(p)}
            if dims and min(dims) == 2 < max(dims) and options(rest) != options(group):
                _warn_once(
                    f"{type(optimizer).__name__}: param group {index} holds only parameters that are single numbers in "
                    "a member, and vectors and matrices are together in another group: a rule such as p.dim() >= 2 was "
                    "asked of stacks [B, *shape], which have one dim more than a member's parameter; let "
                    "hf.optim.groups(fused, rule) ask the members' own"
                )
                return

"""Param groups of an array, chosen parameter by parameter as for one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from hfusion.core.errors import FusionError
from hfusion.core.membership import has_rows, membership
from hfusion.core.parameter_attributes import keep_marks
from hfusion.optim.hyper import ParamGroup, plain


class AskedParams(list[nn.Parameter]):
    """Parameters of a group that was chosen by a rule for members' own parameters, not by the shape of stacks."""


def asked_of_members(group: Any) -> bool:
    """Return whether `groups` made a param group that no optimizer has taken yet."""
    return isinstance(group, dict) and isinstance(group.get("params"), AskedParams)


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
        name, parameters = _rows(stack)
        answers = [rule(name, parameter) for parameter in parameters]
        if all(answer is None for answer in answers):
            continue
        options = _options(name, answers)
        group = next(
            (g for g in param_groups if {key: value for key, value in g.items() if key != "params"} == options), None
        )
        if group is None:
            group = {"params": AskedParams(), **options}
            param_groups.append(group)
        group["params"].append(stack)
    return param_groups


def _rows(stack: nn.Parameter) -> tuple[str, list[nn.Parameter]]:
    """Return the name of a parameter of an array, and those of its members, one for each."""
    mark = membership(stack)
    if mark is None:
        raise FusionError(f"hf.optim.groups got a parameter of shape {list(stack.shape)} that belongs to no array")
    rows = list(stack.detach()) if mark.stacked else [stack.detach()] * mark.members
    parameters = [nn.Parameter(row, requires_grad=stack.requires_grad) for row in rows]
    for parameter in parameters:
        keep_marks(parameter, stack)
    return mark.name, parameters


def _options(name: str, answers: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return the options of a stack from those of its members. Raises FusionError."""
    for member, answer in enumerate(answers):
        if answer is not None and not isinstance(answer, Mapping):
            raise FusionError(
                f"the rule returned {type(answer).__name__} for {name!r} of member {member}: it must return the "
                'options of a param group, such as {"weight_decay": 0.0}, or None'
            )
        if (answer is None) != (answers[0] is None) or set(answer or ()) != set(answers[0] or ()):
            raise FusionError(
                f"the rule returned {answer!r} for {name!r} of member {member} and {answers[0]!r} for that of member "
                "0: an array has one stack of it, so give the same options for all members; their numbers may differ"
            )
    options = [answer for answer in answers if answer is not None]
    return {key: _joined(f"{key!r} of {name!r}", [answer[key] for answer in options]) for key in options[0]}


def _joined(label: str, values: Sequence[Any]) -> Any:
    """Return the value if all members have the same, otherwise one value per member. Raises FusionError."""
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return list(values)
    if all(isinstance(value, tuple | list) and len(value) == len(values[0]) for value in values):
        return tuple(_joined(label, column) for column in zip(*values, strict=True))
    raise FusionError(f"{label} differs between the members, {list(values)}: only numbers may differ within an array")


def split_by_stack_dims(groups: Sequence[ParamGroup]) -> str:
    """Return why the param groups look as if a rule had asked the dims of stacks; empty if they do not.

    So does ``p.dim() >= 2``, for decay: all stacks but those of single numbers have two dims, so that biases are in the
    group of matrices, and the group of the others is empty or holds single numbers only.
    """
    stacked = [[p for p in group["params"] if has_rows(p)] for group in groups]
    for index, (few, stacks) in enumerate(zip(groups, stacked, strict=True)):
        if any(p.dim() > 1 for p in stacks) or len(stacks) < len(few["params"]):
            continue
        for other, rest in zip(groups, stacked, strict=True):
            dims = {p.dim() for p in rest}
            if other is few or not dims or min(dims) != 2 or max(dims) == 2 or _text(few) == _text(other):
                continue
            reason = "is empty" if not stacks else "holds only parameters that are single numbers in a member"
            return (
                f"param group {index} {reason}, and vectors and matrices are together in another group: a rule such as "
                "p.dim() >= 2 was asked of stacks [B, *shape], which have one dim more than a member's parameter"
            )
    return ""


def _text(group: ParamGroup) -> str:
    return str({key: plain(value) for key, value in group.items() if key not in ("params", "param_names")})

"""The parameters of a fused optimizer after members of other structures have joined its array or left it.

Such members add stacks that the array did not have; when they leave, stacks that no other member has are removed.
Added stacks are numbered within the process, and an optimizer stores the latest number that it was told of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hfusion.core.membership import added_after, arrays, latest_addition
from hfusion.optim.checks import check_padding
from hfusion.optim.group import membership_of

if TYPE_CHECKING:
    from hfusion.optim.base import FusedOptimizer


def check_added_stacks(optimizer: FusedOptimizer) -> None:
    """Raise ValueError if the array has gained parameters that the optimizer was not told of."""
    if latest_addition() == optimizer.additions:
        return
    added = _added(optimizer)
    if added:
        raise ValueError(
            f"members that joined the array brought parameters ({_names(added)}) that this {type(optimizer).__name__} "
            "does not hold: tell it by append(count) after append of the fused module, and by restart(rows) after put"
        )
    optimizer.additions = latest_addition()


def stacks_to_take(optimizer: FusedOptimizer, groups: Mapping[int, Sequence[Tensor]] | None) -> dict[int, list[Tensor]]:
    """Return the stacks to add to each param group, by the number of the group.

    Args:
        groups: the user's choice. By default the only group takes all added stacks; it must hold all other parameters.

    Raises:
        ValueError: a group does not exist, a parameter was not added, or it is ambiguous which group takes them.
    """
    count = len(optimizer.param_groups)
    for number, group in enumerate(optimizer.param_groups):
        if all(membership_of(param).is_unused for param in group["params"]):
            raise ValueError(
                f"no member has a parameter of param group {number} any more, such as "
                f"{membership_of(group['params'][0]).name!r}: make a new optimizer"
            )
        for param in group["params"]:
            check_padding(membership_of(param), optimizer)
    if groups is None and latest_addition() == optimizer.additions:
        return {}
    added = _added(optimizer)
    if groups is not None:
        chosen = {number: list(params) for number, params in groups.items()}
        if wrong := [number for number in chosen if number not in range(count)]:
            raise ValueError(f"groups={{{wrong[0]!r}: ...}}: there are param groups 0 to {count - 1}")
        added_ids = set(map(id, added))
        if any(id(param) not in added_ids for params in chosen.values() for param in params):
            raise ValueError(f"groups: give parameters that joining members have brought: {_names(added) or 'none'}")
    elif added:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]} | set(map(id, added))
        partial = any(p.requires_grad and id(p) not in held for p in _array_of(optimizer).parameters())
        if count > 1 or partial:
            reason = f"has {count} param groups" if count > 1 else "holds only some of the array's other parameters"
            key = membership_of(added[0]).name
            raise ValueError(
                f"the members that join have parameters of their own ({_names(added)}), and the "
                f"{type(optimizer).__name__} {reason}: say which group takes them, "
                f"groups={{0: [fused.get_parameter({key!r})]}}, or that none does, groups={{}}"
            )
        chosen = {0: added}
    else:
        chosen = {}
    for params in chosen.values():
        optimizer._check_params(params)
    return chosen


def take_stacks(optimizer: FusedOptimizer, chosen: Mapping[int, Sequence[Tensor]]) -> None:
    """Add the ``chosen`` stacks to the param groups, in the array's order, and remove stacks that no member has."""
    optimizer.additions = latest_addition()
    changed = False
    for number, group in enumerate(optimizer.param_groups):
        unused = [param for param in group["params"] if membership_of(param).is_unused]
        if not unused and not chosen.get(number):
            continue
        changed = True
        for param in unused:
            optimizer.state.pop(param, None)
        unused_ids = set(map(id, unused))
        order = {id(param): index for index, param in enumerate(_array_of(optimizer).parameters())}
        params = [*(p for p in group["params"] if id(p) not in unused_ids), *chosen.get(number, ())]
        group["params"][:] = sorted(params, key=lambda param: order.get(id(param), len(order)))
    if changed:
        optimizer.forget()
        optimizer._released.clear()


def _added(optimizer: FusedOptimizer) -> list[Tensor]:
    """Return the stacks of the optimizer's array that the optimizer was not told of."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    stacks = _array_of(optimizer).parameters()
    return [p for p in stacks if id(p) not in held and added_after(p, optimizer.additions)]


def _array_of(optimizer: FusedOptimizer) -> nn.Module:
    """Return the fused module whose parameters the optimizer holds, or an empty module if it no longer exists."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return next((a for a in arrays if any(id(param) in held for param in a.parameters())), nn.Module())


def _names(params: Sequence[Any]) -> str:
    return ", ".join(membership_of(param).name for param in params)

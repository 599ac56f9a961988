"""A member that moves from one group of a population to another, with all that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hfusion.core.membership import member_rows
from hfusion.core.row_indices import write_rows
from hfusion.optim.group import membership_of
from hfusion.optim.lr_scheduler import Make
from hfusion.population.accumulation import Accumulation
from hfusion.population.members import apart
from hfusion.population.plain_module import PlainModule

if TYPE_CHECKING:
    from hfusion.population.training_group import TrainingGroup


@dataclass(frozen=True)
class MemberState:
    """A member's model and training state, independent of any group.

    Attributes:
        model: the member's model, with its tensors.
        tag: its name.
        numbers: its hyper-parameters, limits, scale, age and the rest of `TrainingGroup.numbers`, by name.
        state: its optimizer state, by name of parameter and entry.
        make, schedule: the function that made its scheduler, and the scheduler's state; None without one.
        updates: its progress in an update, with one row.
    """

    model: nn.Module
    tag: str
    numbers: Mapping[str, Tensor]
    state: Mapping[tuple[str, str], Tensor]
    make: Make | None
    schedule: Mapping[str, Any] | None
    updates: Accumulation


def copy_member_state(group: TrainingGroup, row: int) -> MemberState:
    """Return a copy of the member in ``row`` of a group, with its training state."""
    scheduler, updates = group.scheduler, group._updates
    state: dict[tuple[str, str], Tensor] = {}
    for param_group in group.optimizer.param_groups:
        for param in param_group["params"]:
            mark = membership_of(param)
            for entry, value in group.optimizer.state.get(param, {}).items():
                state[mark.name, entry] = member_rows(value, mark)[row].clone()
    group.fused._views.update(group.fused)
    model = apart(group.fused, row)
    if not int(updates.done[row]):
        updates = replace(updates, buffers=None)
    return MemberState(
        model,
        group._roll.tag(row),
        {name: values[row].clone() for name, values in group.numbers().items()},
        state,
        None if scheduler is None else scheduler._makes[row],
        None if scheduler is None else scheduler.member_state(row),
        updates.of_rows([row], cast(Any, PlainModule(model) if updates.underway or updates.buffers else None)),
    )


@torch.no_grad()
def put_member_state(group: TrainingGroup, row: int, member: MemberState) -> None:
    """Write the training state of ``member`` to a row of a group that has its model already."""
    if group.scheduler is not None:
        group.scheduler.replace([row], member.make)
    for name, values in group.numbers().items():
        values[row] = member.numbers[name]
    _put_state(group, row, member.state)
    if group.scheduler is not None and member.schedule is not None:
        group.scheduler.load_member(row, member.schedule)
    calls = group._updates.calls.clone()
    calls[row] = member.updates.calls[0]
    group._updates = replace(group._updates, calls=calls)
    group._updates.put_rows([row], member.updates, group.fused)
    # Without an event in its history.
    group._roll.rename(row, member.tag)


def _put_state(group: TrainingGroup, row: int, state: Mapping[tuple[str, str], Tensor]) -> None:
    """Write a member's optimizer state; entries that it lacks are as before the first step."""
    optimizer = group.optimizer
    optimizer.restart(row)
    if not state:
        return
    names = {name for name, _ in state}
    params = {membership_of(p).name: p for param_group in optimizer.param_groups for p in param_group["params"]}
    for param_group in optimizer.param_groups:
        settings = optimizer._settings(param_group)
        for param in param_group["params"]:
            if settings.stateful and membership_of(param).name in names:
                optimizer._state(param, settings)
    for (name, entry), value in state.items():
        param = params[name]
        entries = optimizer.state.get(param, {})
        if entry in entries:
            write_rows(member_rows(entries[entry], membership_of(param)), [row], value[None])
        elif entry not in optimizer.numbers:
            # An entry that the present settings do not use, such as a momentum that was set to 0 later.
            if not membership_of(param).stacked:
                optimizer.state[param][entry] = value.clone()
                continue
            shape = param.shape[1:] if value.dim() == param.dim() - 1 else value.shape
            optimizer.state[param][entry] = stack = value.new_zeros((len(group), *shape))
            write_rows(stack, [row], value[None])
    optimizer.forget()

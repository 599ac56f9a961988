"""A member that moves from one group of a population to another, with all that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from hfusion.capture.registered_tensors import tensors
from hfusion.core.membership import member_rows, membership
from hfusion.core.row_indices import write_rows
from hfusion.optim.group import membership_of
from hfusion.optim.hyper import read
from hfusion.optim.lr_scheduler import Make
from hfusion.population.accumulation import Accumulation
from hfusion.population.members import apart
from hfusion.population.plain_module import PlainModule
from hfusion.population.population import ArrayGroup


@dataclass(frozen=True)
class MemberState:
    """A member's model and training state, independent of any group.

    Attributes:
        model: the member's model, with its tensors.
        tag, age, key, frozen: as in `hfusion.population.members.Roll`.
        state: its optimizer state, by name of parameter and entry.
        hypers: its hyper-parameters, by number of the param group and label.
        make, schedule: the function that made its scheduler, and the scheduler's state; None without one.
        scale: its values of the GradScaler, by name.
        limits: its gradient limits, by name.
        updates: its progress in an update, with one row.
    """

    model: nn.Module
    tag: str
    age: int
    key: int
    frozen: bool
    state: Mapping[tuple[str, str], Tensor]
    hypers: Mapping[tuple[int, str], float]
    make: Make | None
    schedule: Mapping[str, Any] | None
    scale: Mapping[str, float]
    limits: Mapping[str, float]
    updates: Accumulation


def copy_member_state(group: ArrayGroup, row: int) -> MemberState:
    """Return a copy of the member in ``row`` of a group, with its training state."""
    roll, optimizer, scheduler = group._roll, group.optimizer, group.scheduler
    state: dict[tuple[str, str], Tensor] = {}
    hypers: dict[tuple[int, str], float] = {}
    for number, param_group in enumerate(optimizer.param_groups):
        _, columns = read(param_group, optimizer.hypers, optimizer.members)
        for hyper, column in zip(optimizer.hypers, columns, strict=True):
            hypers[number, hyper.label] = column[row]
        for param in param_group["params"]:
            mark = membership_of(param)
            for entry, value in optimizer.state.get(param, {}).items():
                state[mark.name, entry] = member_rows(value, mark)[row].clone()
    scale = {} if group.scaler is None else {name: float(v[row]) for name, v in group.scaler.state_dict().items()}
    limits = {
        name: float(limit.values[row])
        for name in ("norm", "value")
        if (limit := getattr(group._limits, name)) is not None
    }
    group.fused._views.update(group.fused)
    model, updates = apart(group.fused, row), group._updates
    if not int(updates.done[row]):
        updates = replace(updates, buffers=None)
    return MemberState(
        model,
        roll.tag(row),
        int(roll.ages[row]),
        int(roll.keys[row]),
        bool(roll.frozen[row]),
        state,
        hypers,
        None if scheduler is None else scheduler._makes[row],
        None if scheduler is None else scheduler.member_state(row),
        scale,
        limits,
        updates.of_rows([row], cast(Any, PlainModule(model) if updates.underway or updates.buffers else None)),
    )


@torch.no_grad()
def put(group: ArrayGroup, row: int, member: MemberState, *, tensors_too: bool = False) -> None:
    """Write the training state of ``member`` to a row of a group; its model's tensors only with ``tensors_too``."""
    optimizer = group.optimizer
    if tensors_too:
        member_tensors = dict(tensors(member.model))
        for name, tensor in tensors(group.fused):
            mark = membership(tensor)
            if mark is not None and mark.is_own:
                member_rows(tensor.detach(), mark)[row].copy_(member_tensors[name].detach())
    if group.scheduler is not None:
        group.scheduler.replace([row], member.make)
    for number, param_group in enumerate(optimizer.param_groups):
        vectors, _ = read(param_group, optimizer.hypers, optimizer.members)
        for hyper, vector in zip(optimizer.hypers, vectors, strict=True):
            vector[row] = member.hypers[number, hyper.label]
    _put_state(group, row, member.state)
    if group.scheduler is not None and member.schedule is not None:
        group.scheduler.load_member(row, member.schedule)
    if group.scaler is not None and member.scale:
        group.scaler.begin(len(group))
        values = group.scaler.state_dict()
        for name, scale in member.scale.items():
            values[name][row] = scale
        group.scaler.load_state_dict(values)
    for name, bound in member.limits.items():
        limit = getattr(group._limits, name)
        values_of = limit.values.clone()
        values_of[row] = bound
        group._limits = replace(group._limits, **{name: replace(limit, values=values_of)})
    calls = group._updates.calls.clone()
    calls[row] = member.updates.calls[0]
    group._updates = replace(group._updates, calls=calls)
    group._updates.put_rows([row], member.updates, group.fused)
    enter(group, row, member)


def enter(group: ArrayGroup, row: int, member: MemberState) -> None:
    """Write a member's name, age, key and frozen flag to a row, without an event in its history."""
    roll = group._roll
    roll.tags[row], roll._alive = member.tag, None
    roll.ages[row], roll.keys[row], roll.frozen[row] = member.age, member.key, member.frozen


def _put_state(group: ArrayGroup, row: int, state: Mapping[tuple[str, str], Tensor]) -> None:
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


def group_optimizer(make: Callable[[Any], Any], total: int, rows: Iterable[int] | None) -> Callable[[Any], Any]:
    """Return ``make`` for a group of a population that began with ``total`` members.

    Of options with a value for each of ``total`` members, such as learning rates, the group gets the values of
    ``rows``. None: for a joining member, which gets the first values; the caller sets those in which members differ.
    """

    def create_optimizer(parameters: Any) -> Any:
        params = list(parameters)
        marks = [membership_of(param) for param in params]
        for param, mark in zip(params, marks, strict=True):
            param._hfusion_membership = replace(mark, members=total)
        try:
            optimizer = make(iter(params))
        finally:
            for param, mark in zip(params, marks, strict=True):
                param._hfusion_membership = mark
        if hasattr(optimizer, "hypers"):
            chosen = [0] * marks[0].members if rows is None else list(rows)
            for param_group in optimizer.param_groups:
                # Makes the param group hold a vector of each hyper-parameter.
                read(param_group, optimizer.hypers, total)
                for hyper in optimizer.hypers:
                    held = param_group[hyper.key]
                    if hyper.index is None:
                        param_group[hyper.key] = held[chosen].clone()
                    else:
                        pair = list(held)
                        pair[hyper.index] = pair[hyper.index][chosen].clone()
                        param_group[hyper.key] = tuple(pair)
        return optimizer

    return create_optimizer

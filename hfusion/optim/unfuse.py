"""From the param groups and the state of a fused optimizer to those of its members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.core.row_indices import leading
from hfusion.optim.group import State, membership_of
from hfusion.optim.hyper import plain
from hfusion.optim.master_weights import OPTION
from hfusion.optim.settings import ParamGroup


def member_state_dicts(
    param_groups: Sequence[ParamGroup],
    state: Mapping[Tensor, State],
    options: ParamGroup,
    *,
    counted: bool,
    early: bool,
) -> list[dict[str, Any]]:
    """B state dicts, one per member, as torch's optimizers load them; the state is copied.

    ``options``: what a param group of torch has besides. ``counted``: a state holds ``step``. ``early``: there is state
    before the first step.
    """
    params = [param for group in param_groups for param in group["params"]]
    state_dicts = []
    for member in range(membership_of(params[0]).members):
        own_params = [param for param in params if membership_of(param).exists_in(member)]
        numbers = {param: number for number, param in enumerate(own_params)}
        states = {
            number: entry
            for param, number in numbers.items()
            if (entry := _member_state(state.get(param, {}), param, member)) and (early or entry["step"] > 0)
        }
        groups = [
            {
                **options,
                **_member_group(group, member),
                "params": [numbers[param] for param in group["params"] if param in numbers],
            }
            for group in param_groups
        ]
        if not counted:
            for entry in states.values():
                del entry["step"]
        state_dicts.append({"state": states, "param_groups": groups})
    return state_dicts


def _member_group(group: ParamGroup, member: int) -> dict[str, Any]:
    members = len(group["lr"])
    entries = {key: value for key, value in group.items() if key != OPTION}
    return {key: _member_value(plain(value), member, members) for key, value in entries.items()}


def _member_value(value: Any, member: int, members: int) -> Any:
    if isinstance(value, Tensor) and value.shape == (members,):
        return float(value[member])
    if isinstance(value, tuple):
        return tuple(_member_value(item, member, members) for item in value)
    return value


def _member_state(entry: State, param: Tensor, member: int) -> State:
    mark = membership_of(param)
    rows = {name: value[member] if mark.stacked else value for name, value in entry.items()}
    shape = mark.shapes[member] if mark.shapes else None
    if shape is not None:
        # A number per member, such as a step count, does not have the shape of the parameter.
        rows = {name: leading(row, shape) if row.dim() == len(shape) else row for name, row in rows.items()}
    return {name: row.clone(memory_format=torch.contiguous_format) for name, row in rows.items()}

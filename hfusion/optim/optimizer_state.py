"""The state of one parameter: the shape and dtype of its numbers, how a stack begins, and the state of each member."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.core.errors import CheckpointError
from hfusion.core.memory import real_view
from hfusion.optim.formula import Formula
from hfusion.optim.group import State, membership_of
from hfusion.optim.hyper import plain
from hfusion.optim.master_weights import OPTION, STACK, state_dtype
from hfusion.optim.settings import ParamGroup, Settings


def paired(groups: Sequence[ParamGroup], state_dict: Mapping[str, Any]) -> list[tuple[Tensor, Mapping[str, Any]]]:
    """Return each parameter for which a state dict has state, with that state."""
    params = [param for group in groups for param in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    state = state_dict["state"]
    return [(param, state[key]) for key, param in zip(keys, params, strict=True) if key in state]


def check_entries(
    groups: Sequence[ParamGroup],
    state: Mapping[Any, Any],
    saved: Sequence[Mapping[str, Any]],
    numbers: Container[str],
) -> None:
    """Raise CheckpointError unless ``state``, saved with the param groups ``saved``, fits the parameters in ``groups``.

    numbers: the names of state that is one number per member.
    """
    keys = [key for group in saved for key in group["params"]]
    unknown = [key for key in state if key not in keys]
    if unknown:
        raise CheckpointError(f"the state has a parameter {unknown[0]!r} that is in none of its param groups")
    params = [param for group in groups for param in group["params"]]
    for key, param in zip(keys, params, strict=False):
        entry = state.get(key, {})
        if not isinstance(entry, Mapping):
            raise CheckpointError(f"the state of parameter {key} must be a dict of tensors, got {type(entry).__name__}")
        for name, value in entry.items():
            expected_shape = numbers_shape(param) if name in numbers else param.shape
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise CheckpointError(f"the state {name!r} of parameter {key} must be a tensor, got {kind}")
            if value.shape != expected_shape:
                raise CheckpointError(
                    f"the state {name!r} of parameter {key} has shape {list(value.shape)}, this "
                    f"optimizer needs {list(expected_shape)}: load the state of an array with the same members"
                )


def parts_of(state_dict: Any) -> tuple[Mapping[Any, Any], Sequence[Mapping[str, Any]]]:
    """Return the state and the param groups of a state dict. Raises CheckpointError for anything else."""
    if isinstance(state_dict, Mapping) and "state" in state_dict and "param_groups" in state_dict:
        state, groups = state_dict["state"], state_dict["param_groups"]
        lists = isinstance(groups, list | tuple) and all(
            isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple) for group in groups
        )
        if lists and isinstance(state, Mapping):
            return state, groups
    keys = f" with keys {sorted(map(str, state_dict))[:5]}" if isinstance(state_dict, Mapping) else ""
    raise CheckpointError(
        'the state must be what an optimizer\'s state_dict() returned: a dict of "state", by parameter, and '
        f'"param_groups", a list of dicts. Got {type(state_dict).__name__}{keys}.'
    )


def complete_state(param: Tensor, state: State, settings: Settings, formula: type[Formula]) -> State:
    """Add what a step needs and ``state`` of a parameter lacks, at its initial values; return ``state``."""
    dtype = state_dtype(param, settings.masters)
    if dtype != param.dtype and STACK not in state:
        state[STACK] = param.detach().to(torch.float32, copy=True)
    if state.keys() >= {*formula.numbers, *settings.names}:
        return state
    for name, first in formula.numbers.items():
        kind = torch.float32 if name == "step" else scalar_dtype()
        state.setdefault(name, torch.full(numbers_shape(param), first, dtype=kind, device="cpu"))
    fills = [formula.begin(values, settings.options) for values in settings.members]
    for name in settings.names:
        if name not in state:
            state[name] = _filled(param, [fill.get(name, 0.0) for fill in fills], dtype)
    return state


def _filled(param: Tensor, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return a stack like ``param`` with each row filled with one of ``values``, also as the imaginary part."""
    stack = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    if any(values):
        rows = real_view(stack) if membership_of(param).stacked else [real_view(stack)]
        for row, value in zip(rows, values, strict=membership_of(param).stacked):
            row.fill_(value)
    return stack


def scalar_dtype() -> torch.dtype:
    """Return the dtype in which torch's optimizers keep scalar state."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def numbers_shape(param: Tensor) -> torch.Size:
    """Return the shape of scalar state: ``[B]``, or ``[]`` for a parameter that is not stacked."""
    mark = membership_of(param)
    return torch.Size([mark.members] if mark.stacked else [])


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
        numbers = {param: number for number, param in enumerate(params)}
        states = {
            number: entry
            for param, number in numbers.items()
            if (entry := _member_state(state.get(param, {}), param, member)) and (early or entry["step"] > 0)
        }
        groups = [
            {
                **options,
                **_member_group(group, member),
                "params": [numbers[param] for param in group["params"]],
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
    return {name: row.clone(memory_format=torch.contiguous_format) for name, row in rows.items()}

"""The state of one parameter: the shape and dtype of its numbers, how a stack begins, and the state of each member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.core.errors import CheckpointError
from hfusion.core.memory import real_view
from hfusion.optim.formula import Formula
from hfusion.optim.group import State, membership_of
from hfusion.optim.hyper import MASTER_STACK, MASTER_WEIGHTS, Settings, plain, state_dtype


def saved_entries(optimizer: Any, state_dict: Any) -> list[tuple[Tensor, Mapping[str, Tensor]]]:
    """Return each parameter for which a state dict has state, with that state.

    Raises CheckpointError if it is not a state dict of such an optimizer.
    """
    try:
        state, groups = state_dict["state"], state_dict["param_groups"]
        for group, saved in zip(optimizer.param_groups, groups, strict=False):
            optimizer._settings({**saved, "params": group["params"]})
        keys = [key for group in groups for key in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if unknown := state.keys() - keys:
            raise ValueError(f"it has a parameter {min(unknown)!r} that is in none of its param groups")
        entries = [(key, param, dict(state[key])) for key, param in zip(keys, params, strict=False) if key in state]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        name = type(optimizer).__name__
        raise CheckpointError(f"the state is not one of this array and of {name}: {error}") from error
    for key, param, entry in entries:
        for name, value in entry.items():
            expected_shape = numbers_shape(param) if name in optimizer.numbers else param.shape
            if not isinstance(value, Tensor) or value.shape != expected_shape:
                actual = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise CheckpointError(
                    f"the state {name!r} of parameter {key} has {actual}, this optimizer needs a tensor of shape "
                    f"{list(expected_shape)}: load the state of an array with the same members"
                )
    return [(param, entry) for _, param, entry in entries]


def complete_state(param: Tensor, state: State, settings: Settings, formula: type[Formula]) -> State:
    """Add what a step needs and ``state`` of a parameter lacks, at its initial values; return ``state``."""
    dtype = state_dtype(param, settings.masters)
    if dtype != param.dtype and MASTER_STACK not in state:
        state[MASTER_STACK] = param.detach().to(torch.float32, copy=True)
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


def member_state_dicts(optimizer: Any) -> list[dict[str, Any]]:
    """Return B state dicts, one per member, as torch's optimizers load them; the state is copied."""
    kind = optimizer.torch_class
    example = None if kind is None else kind([torch.zeros(1, 1, device="cpu")])
    # Some classes have state before their first step.
    early = example is not None and bool(example.state)
    if early:
        optimizer.initialise()
    members, numbers = optimizer.members, {param: number for number, param in enumerate(optimizer._params())}
    state_dicts = []
    for member in range(members):
        states = {}
        for param, number in numbers.items():
            entry = optimizer.state.get(param, {}).items()
            rows = {name: value[member] if membership_of(param).stacked else value for name, value in entry}
            if rows and (early or rows["step"] > 0):
                kept = rows.keys() - ({"step"} if not optimizer.counts_steps else ())
                states[number] = {name: rows[name].clone(memory_format=torch.contiguous_format) for name in kept}
        groups = [{} if example is None else dict(example.param_groups[0]) for _ in optimizer.param_groups]
        for values, group in zip(groups, optimizer.param_groups, strict=True):
            own = {key: value for key, value in group.items() if key != MASTER_WEIGHTS}
            values.update({key: _member_value(plain(value), member, members) for key, value in own.items()})
            values["params"] = [numbers[param] for param in group["params"]]
        state_dicts.append({"state": states, "param_groups": groups})
    return state_dicts


def _member_value(value: Any, member: int, members: int) -> Any:
    if isinstance(value, Tensor) and value.shape == (members,):
        return float(value[member])
    if isinstance(value, tuple):
        return tuple(_member_value(item, member, members) for item in value)
    return value

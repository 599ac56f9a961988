"""The state of one parameter: the shape and dtype of its numbers, and how a stack begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.optim.group import membership_of
from hfusion.optim.settings import ParamGroup


def paired(groups: Sequence[ParamGroup], state_dict: Mapping[str, Any]) -> list[tuple[Tensor, Mapping[str, Any]]]:
    """The parameters that a state dict has state of, with that state."""
    params = [param for group in groups for param in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    found = state_dict["state"]
    return [(param, found[key]) for key, param in zip(keys, params, strict=True) if key in found]


def filled(param: Tensor, values: Sequence[float]) -> Tensor:
    """A stack like ``param`` with one number in each row."""
    stack = torch.zeros_like(param, memory_format=torch.preserve_format)
    if not any(values):
        return stack
    if not membership_of(param).stacked:
        return stack.fill_(values[0])
    for row, value in zip(stack, values, strict=True):
        row.fill_(value)
    return stack


def scalar_dtype() -> torch.dtype:
    """What torch's optimizers keep their numbers in."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def numbers_shape(param: Tensor) -> torch.Size:
    """One number per member, or one of all where these share the parameter."""
    found = membership_of(param)
    return torch.Size([found.members] if found.stacked else [])

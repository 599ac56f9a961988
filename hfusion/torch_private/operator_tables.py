"""The tables of torch's operators: names, kernels by dispatch key, decompositions."""

from __future__ import annotations

import torch
from torch._decomp import decomposition_table
from torch._ops import HigherOrderOperator
from torch._refs import linspace as decomposed_linspace

__all__ = [
    "HigherOrderOperator",
    "decomposed_linspace",
    "decomposition_table",
    "has_device_kernel",
    "is_composite",
    "operator_names",
]


def operator_names() -> list[str]:
    """Return the names of all operators, such as ``aten::add.Tensor``."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


def is_composite(name: str) -> bool:
    """Return whether the operator ``name`` is written as calls of others, also for autograd."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def has_device_kernel(name: str, device: torch.device) -> bool:
    """Return whether the operator ``name`` has a kernel for devices of this type."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

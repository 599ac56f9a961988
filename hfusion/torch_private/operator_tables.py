"""The tables of torch's operators: names, kernels by dispatch key, decompositions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._ops import HigherOrderOperator
from torch._refs import linspace as decomposed_linspace

# What is imported here for other files.
__all__ = ["HigherOrderOperator", "decomposed_linspace", "decomposition_table"]


# Returns the names of all operators, such as ``aten::add.Tensor``.
operator_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names


def is_composite(name: str) -> bool:
    """Return whether the operator ``name`` is written as calls of others, also for autograd."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def has_device_kernel(name: str, device: torch.device) -> bool:
    """Return whether the operator ``name`` has a kernel for devices of this type."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


# The last states of LSTMs in traces: torch up to 2.11 decomposes an LSTM into states with a dim too many.
#
# Kernels return ``[L, N, H]``; the decomposition of torch 2.11, which tracing runs, returns ``[L, 1, N, H]`` for N > 1.
# Code that uses the states would be captured with wrong shapes, and compiled steps would return them.


@cache
def correct_lstm_decomposition() -> None:
    """Patch torch's decomposition, for the rest of the process: last states get the shape of the first ones."""
    from torch._decomp import decompositions

    module: Any = decompositions
    one_layer = getattr(module, "one_layer_lstm", None)
    if one_layer is None:
        return

    @wraps(one_layer)
    def corrected(inp: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        y, states = one_layer(inp, hidden, *args, **kwargs)
        pairs = zip(states, hidden, strict=True)
        return y, tuple(last if last.dim() == first.dim() else last.reshape(first.shape) for last, first in pairs)

    module.one_layer_lstm = corrected

"""State of Dynamo: its lock, its tensor guards, and the trace that a thread is in."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch._guards import tracing

__all__ = ["TensorGuards", "compile_lock", "outside_trace", "tensor_guards", "uncompiled"]


def tensor_guards(tensors: Sequence[Tensor]) -> TensorGuards:
    """Return torch's guards, which check if tensors have the same types, dtypes, devices, shapes and strides."""
    sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
    strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def compile_lock() -> AbstractContextManager[Any]:
    """Return the lock that a thread holds while Dynamo compiles. Imports Dynamo."""
    from torch._dynamo.convert_frame import compile_lock as lock

    return lock


def outside_trace() -> AbstractContextManager[Any]:
    """Context manager: hide the trace that this thread is in."""
    return tracing(None)


def uncompiled(model: Any) -> Any:
    """Return the module inside a wrapper of torch.compile; anything else as it is."""
    while type(model).__module__ == "torch._dynamo.eval_frame":
        model = model._orig_mod
    return model

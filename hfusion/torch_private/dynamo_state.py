"""State of Dynamo: its lock, its tensor guards, and the trace that a thread is in."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch._guards import tracing
from torch.utils._python_dispatch import TorchDispatchMode

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


# Call functions that torch hides from Dynamo without importing Dynamo, which takes a second.
#
# Torch imports Dynamo at their first call. As long as nothing else has imported it, there is nothing to hide from.

ModeClass = TypeVar("ModeClass", bound=type[TorchDispatchMode])


def is_dynamo_imported() -> bool:
    return "torch._dynamo" in sys.modules


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of a torch function that hides from Dynamo only if Dynamo is imported."""
    plain = inspect.unwrap(function)

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (function if is_dynamo_imported() else plain)(*args, **kwargs)

    return called


def sparing_dynamo(mode: ModeClass) -> ModeClass:
    """Class decorator for modes, whose methods torch hides from Dynamo when the class is created."""
    dispatch: Any = without_dynamo(mode.__torch_dispatch__)
    mode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    return mode

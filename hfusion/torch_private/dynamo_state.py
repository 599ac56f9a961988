"""What Dynamo keeps: its lock, its guards of tensors, and the trace that a thread is in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._C._dynamo.guards import TensorGuards
from torch._guards import tracing

__all__ = ["TensorGuards", "compile_lock", "outside_trace"]


def compile_lock() -> AbstractContextManager[Any]:
    """Return the lock that a thread holds while Dynamo compiles. Imports Dynamo."""
    from torch._dynamo.convert_frame import compile_lock as lock

    return lock


def outside_trace() -> AbstractContextManager[Any]:
    """Context manager: hide the trace that this thread is in."""
    return tracing(None)

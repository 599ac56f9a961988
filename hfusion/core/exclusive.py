"""One trace at a time: torch's tracers replace functions of the whole process while they run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Reentrant, as a trace may call what traces.
tracing = threading.RLock()


@contextmanager
def compiling() -> Iterator[None]:
    """Trace and compile. Who compiles under Dynamo holds its lock when it asks for ours, so that one comes first."""
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock, tracing:
        yield

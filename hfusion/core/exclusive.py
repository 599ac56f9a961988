"""One trace at a time: torch's tracers replace functions of the whole process while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hfusion.torch_private.dynamo_state import compile_lock

# Reentrant, since traced code may trace, too.
tracing = threading.RLock()


class _CompilingThread(threading.local):
    within: Callable[[], AbstractContextManager[None]] = nullcontext


_here = _CompilingThread()


@contextmanager
def compiling_within(alone: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Context manager: this thread enters ``alone()`` before it waits for the locks of `compiling`."""
    outer, _here.within = _here.within, alone
    try:
        yield
    finally:
        _here.within = outer


class FairLock:
    """A reentrant lock: once released, it goes to a thread that waits for it.

    A training thread, which takes its lock again and again, may keep a lock of Python from other threads for ever.
    """

    def __init__(self) -> None:
        self._next, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner != threading.get_ident():
            with self._next:
                self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()


@contextmanager
def compiling() -> Iterator[None]:
    """Context manager to trace and compile. Dynamo's lock comes first: compilations under Dynamo hold it already."""
    with _here.within(), compile_lock(), tracing:
        yield

"""One lock for what threads cannot do at the same time: captures, and draws from states that only one task has.

torch's tracers replace functions of the whole process while they run, and torch's random generators belong to the
process. See "Threads" in docs/forward.md.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

from hfusion.torch_private.export_state import compile_lock
from hfusion.torch_private.replaced_functions import replaced

_locks: WeakSet[FairLock] = WeakSet()
_RLock: Any = type(threading.RLock())
# Seconds after which a thread that waits looks for the lock that `FairLock.take_from` has put in place of its own.
_GLANCE = 1.0


class FairLock(_RLock):  # type: ignore[misc]
    """A reentrant lock: once released, it goes to a thread that waits for it.

    A training thread, which takes its lock again and again, may keep a lock of Python from other threads for ever.
    It is left by Python's own method, which is in C: a KeyboardInterrupt between two lines would leave it locked.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()
        # The thread that had it last.
        self._thread: int | None = None
        _locks.add(self)

    def __enter__(self) -> bool:
        is_inner = self.owned
        try:
            if is_inner:
                self.acquire()
            else:
                with self._next:
                    while not self.acquire(timeout=_GLANCE):
                        pass
                    self._thread = threading.get_ident()
            return True
        except BaseException:
            # Interrupted: where the thread has the lock, that was after it was taken.
            if self.owned:
                self.release()
            raise

    @property
    def owned(self) -> bool:
        """True if this thread has the lock."""
        return bool(self._is_owned())

    def take_from(self, thread: int | None) -> None:
        """Release the lock if ``thread``, which hangs, has it. That thread gets a RuntimeError when it goes on."""
        if thread is not None and self._thread == thread:
            self._at_fork_reinit()


def _forget_others() -> None:
    """In a forked process: forget the parent's other threads, which had locks or waited for them."""
    for lock in _locks:
        lock._next = threading.Lock()
        if not lock.owned:
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_others)


# Reentrant, since traced code may trace, too.
tracing = FairLock()


_here = threading.local()


def compiling_within(alone: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Context manager: this thread enters ``alone()`` before it waits for the locks of `compiling`."""
    return replaced(_here, {"within": alone})


@contextmanager
def compiling() -> Iterator[None]:
    """Context manager to trace and compile. Dynamo's lock comes first: compilations under Dynamo hold it already."""
    with getattr(_here, "within", nullcontext)(), compile_lock(), tracing:
        yield

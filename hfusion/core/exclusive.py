"""One lock for what threads cannot do at the same time: captures, and draws from states that only one task has.

torch's tracers replace functions of the whole process while they run, and torch's random generators belong to the
process. See "Threads" in docs/forward.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hfusion.torch_private.export_state import compile_lock
from hfusion.torch_private.replaced_functions import replaced


class FairLock:
    """A reentrant lock: once released, it goes to a thread that waits for it.

    A training thread, which takes its lock again and again, may keep a lock of Python from other threads for ever.
    """

    def __init__(self) -> None:
        self._next, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if not self.owned:
            with self._next:
                self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *raised: object) -> None:
        # If not, another thread has taken it away.
        if self.owned:
            self._depth -= 1
            if not self._depth:
                self.take_from(self._owner)

    @property
    def owned(self) -> bool:
        """True if this thread has the lock."""
        return self._owner == threading.get_ident()

    def take_from(self, thread: int | None) -> None:
        """Release the lock if ``thread``, which hangs, has it."""
        if thread is not None and self._owner == thread:
            self._owner, self._depth = None, 0
            self._lock.release()

    def forget_waiting(self) -> None:
        """In a forked process: forget the parent's threads that waited for the lock."""
        self._next = threading.Lock()


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

"""The lock between computing and capturing: torch.export patches state of the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class Gate:
    """A lock: either many threads compute, or one captures, as torch.export patches state of the whole process."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._computing = 0
        self._exclusive = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive)
            self._computing += 1
        try:
            yield
        finally:
            with self._changed:
                self._computing -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive and not self._computing)
            self._exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._exclusive = False
                self._changed.notify_all()

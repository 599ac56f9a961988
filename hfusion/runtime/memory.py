"""Budgets of devices, enforced by counting: nobody takes bytes that are not free."""

from __future__ import annotations

from threading import Condition


class Stopped(Exception):
    """The run ends; whoever waits gives up. Never shown to the user."""


class Ledger:
    """The bytes taken on one device. ``changed`` is the run's one condition; its lock guards every ledger."""

    def __init__(self, name: str, budget: int, changed: Condition) -> None:
        self.name = name
        self.budget = budget
        self.taken = 0
        self.peak = 0
        self.closed = False
        self._changed = changed

    def take(self, size: int) -> None:
        """Wait until ``size`` more bytes fit, and take them. Raises Stopped when the run ends before."""
        with self._changed:
            while self.taken + size > self.budget:
                if self.closed:
                    raise Stopped
                self._changed.wait()
            if self.closed:
                raise Stopped
            self.taken += size
            self.peak = max(self.peak, self.taken)

    def give(self, size: int) -> None:
        """Give ``size`` bytes back."""
        with self._changed:
            self.taken -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Let everybody who waits give up."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

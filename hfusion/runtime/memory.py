"""Budgets of devices, enforced by counting: nobody takes bytes that are not free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ledger:
    """The bytes taken on one device, and the most that ever were. The run's lock guards it.

    ``promised``: bytes that will be taken when what is leaving has left; nobody else gets them.
    """

    name: str
    budget: int
    taken: int = 0
    peak: int = 0
    promised: int = 0

    def take(self, size: int, later: int = 0) -> bool:
        """Take ``size`` more bytes if they fit, and promise ``later`` more; whether they did."""
        if self.taken + self.promised + size > self.budget:
            return False
        self._take(size)
        self.promised += later
        return True

    def redeem(self, size: int) -> bool:
        """Take ``size`` bytes that are promised if they fit; whether they did."""
        if self.taken + size > self.budget:
            return False
        self.promised -= size
        self._take(size)
        return True

    def _take(self, size: int) -> None:
        self.taken += size
        self.peak = max(self.peak, self.taken)

    def give(self, size: int) -> None:
        """Give ``size`` bytes back."""
        self.taken -= size

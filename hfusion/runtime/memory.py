"""Budgets of devices, enforced by counting: nobody takes bytes that are not free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ledger:
    """The bytes taken on one device, and the most that ever were. The run's lock guards it."""

    name: str
    budget: int
    taken: int = 0
    peak: int = 0

    def take(self, size: int) -> bool:
        """Take ``size`` more bytes if they fit; whether they did."""
        if self.taken + size > self.budget:
            return False
        self.taken += size
        self.peak = max(self.peak, self.taken)
        return True

    def give(self, size: int) -> None:
        """Give ``size`` bytes back."""
        self.taken -= size

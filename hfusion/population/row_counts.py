"""Number of rows of an array for a number of members.

Every number of rows wants compiled programs of its own, so that an array which lost a member at a time would compile at
each. Rows come in blocks of an eighth of the first number instead: one program for all rows as they were first, one for
a block, called once for each, and one for a single member, for fewer than a block. An array that loses one of 64
members at a time so computes 1.11 rows for each member, on average.
"""

from __future__ import annotations

from dataclasses import dataclass

# Blocks of the first number of rows; more would waste less and call more often.
BLOCKS = 8


@dataclass(frozen=True)
class Widths:
    """``first``: the number of rows that the array began with."""

    first: int

    @property
    def block(self) -> int:
        return max(1, -(-self.first // BLOCKS))

    def of(self, members: int) -> int:
        """The number of rows for ``members``."""
        if members >= self.block:
            return -(-members // self.block) * self.block if members != self.first else self.first
        return max(1, members)

    def at_once(self, rows: int) -> int | None:
        """Return the number of rows that one call of a compiled program computes; None for all."""
        if rows == self.first:
            return None
        return self.block if rows % self.block == 0 else 1

"""Number of rows of an array for a number of members.

Each number of rows needs its own compiled programs, so an array that loses one member at a time would compile every
time. Rows therefore come in blocks of an eighth of the first number. There is one program for the first number of rows,
one for a block, called once per block, and one for a single member, for fewer members than a block. An array that loses
one of 64 members at a time then computes 1.11 rows for each member, on average.
"""

from __future__ import annotations

from dataclasses import dataclass

# Number of blocks in the first number of rows; more blocks would waste fewer rows, and need more calls.
BLOCKS = 8


@dataclass(frozen=True)
class Widths:
    """Numbers of rows of an array that began with ``first`` rows."""

    first: int

    @property
    def block(self) -> int:
        return max(1, -(-self.first // BLOCKS))

    def of(self, members: int) -> int:
        """Return the number of rows for ``members`` members."""
        if members >= self.block:
            return -(-members // self.block) * self.block if members != self.first else self.first
        return max(1, members)

    def at_once(self, rows: int) -> int | None:
        """Return the number of rows that one call of a compiled program computes; None for all."""
        if rows == self.first:
            return None
        return self.block if rows % self.block == 0 else 1

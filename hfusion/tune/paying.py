"""How many members an array of a sweep should have: by an estimate at first, then by what its epochs took."""

from __future__ import annotations

import numpy as np

# Of the least time of a member that any width would reach: narrower arrays that come so near are preferred, as samplers
# and pruners then know of more trials when they choose.
_NEAR = 1.25
# The first epoch of a width also makes room, and the very first captures.
_EPOCHS = 2


class PayingWidth:
    """``rows`` make a member about as cheap as it gets. They start at an estimate, and follow what was measured.

    An epoch of w members takes a + b w seconds: what each minibatch costs however many members there are, and what each
    member adds. Two widths tell a and b. Nothing is believed of more than twice the widest that was measured.
    """

    def __init__(self, estimate: int, most: int) -> None:
        self.rows, self._most = estimate, most
        self._seconds: dict[int, list[float]] = {}

    def measured(self, members: int, seconds: float) -> None:
        """An epoch of so many members took so long."""
        self._seconds.setdefault(members, []).append(seconds)
        known = {width: min(each) for width, each in self._seconds.items() if len(each) >= _EPOCHS}
        if known:
            widest = 2 * max(known)
            self.rows = max(1, min(_wanted(known) or widest, widest, self._most))


def _wanted(known: dict[int, float]) -> int | None:
    """The fewest members that come near the cheapest; None where only wider arrays can tell."""
    if len(known) == 1:
        return None
    slope, start = np.polyfit(list(known), list(known.values()), 1)
    # (a + b w) / w <= _NEAR b
    return None if slope <= 0 else max(1, round(start / ((_NEAR - 1) * slope)))

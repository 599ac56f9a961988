"""Random numbers of an array: every member draws its own, and a run can be replayed with the same draws.

All random operators of a fused program draw through `draw`. While `recording` is active the draws are kept, stacked
``[B, *S]`` in the order of the program; the self-check replays them through the members' original code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor


class _Recording(threading.local):
    draws: list[Tensor] | None = None


_active = _Recording()


@contextmanager
def recording() -> Iterator[list[Tensor]]:
    """Collect every draw that this thread makes inside, in order; each is ``[B, *S]``. Not for nested use."""
    outer, draws = _active.draws, list[Tensor]()
    _active.draws = draws
    try:
        yield draws
    finally:
        _active.draws = outer


def draw(sample: Callable[[], Tensor]) -> Tensor:
    """``sample()``, the stacked draws ``[B, *S]`` of all members, noted where a recording is active."""
    drawn = sample()
    if _active.draws is not None:
        _active.draws.append(drawn.detach().clone())
    return drawn

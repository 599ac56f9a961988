"""Random numbers of an array: every member draws its own, and a run can be replayed with the same draws.

All random operators of a fused program draw through `draw`. While `recording` is active the draws are kept, stacked
``[B, *S]`` in the order of the program; the self-check replays them through the members' original code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_record: list[Tensor] | None = None


@contextmanager
def recording() -> Iterator[list[Tensor]]:
    """Collect every draw made inside, in order; each is ``[B, *S]``. Not for nested use or several threads."""
    global _record
    outer, _record = _record, []
    try:
        yield _record
    finally:
        _record = outer


def draw(sample: Callable[[], Tensor]) -> Tensor:
    """``sample()``, the stacked draws ``[B, *S]`` of all members, noted where a recording is active."""
    drawn = sample()
    if _record is not None:
        _record.append(drawn.detach().clone())
    return drawn

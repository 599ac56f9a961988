"""The result of an epoch of an array, and the times of its minibatches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class EpochResult:
    """Values for each tag, and the ``seconds`` of an epoch of ``steps`` minibatches, and ``startup`` besides.

    ``values``: none of a member that is fine where no values were asked for. ``startup``: what the first minibatches of
    a size took longer than most, as programs are captured and compiled then.
    """

    values: dict[str, tuple[float, ...]]
    seconds: float
    startup: float
    steps: int


class Stopwatch:
    """Times of each minibatch: for reading it, and until the next one is requested."""

    def __init__(self) -> None:
        self._all: list[float] = []
        self._first: dict[Any, float] = {}

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The minibatches as they are."""
        before = time.perf_counter()
        for batch in batches:
            yield batch
            now = time.perf_counter()
            self._all.append(now - before)
            sizes = tuple(leaf.shape for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
            self._first.setdefault(sizes, now - before)
            before = now

    @property
    def startup(self) -> float:
        """Seconds that the first ones of each size took longer than most."""
        usual = median_low(self._all) if self._all else 0.0
        return sum(max(0.0, each - usual) for each in self._first.values())

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
    """The values and times of an epoch of an array.

    Attributes:
        values: the values of each member, by its tag: empty if no values were requested, NaN if training diverged.
        seconds: of the epoch, without ``startup``.
        startup: extra seconds of the first minibatches of each size, in which programs are captured and compiled.
        steps: the number of minibatches.
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
        """Yield the minibatches unchanged, and measure the time of each."""
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
        """Extra seconds of the first minibatch of each size, compared with the median minibatch."""
        usual = median_low(self._all) if self._all else 0.0
        return sum(max(0.0, seconds - usual) for seconds in self._first.values())

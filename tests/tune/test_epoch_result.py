"""How the seconds of an epoch are divided into the usual time of its minibatches and the startup of its array."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from hfusion.tune.epoch_result import Stopwatch


@pytest.mark.parametrize(
    ("sizes", "seconds", "startup"),
    [
        ([8, 8, 8], [9, 1, 1], 8),
        # The last is smaller, and captured, too.
        ([8, 8, 8, 8, 5], [9, 1, 1, 1, 6], 8 + 5),
        # One that is odd later may be so again.
        ([8, 8, 8, 8], [1, 1, 7, 1], 0),
        # A first minibatch that is faster saves nothing.
        ([8, 8, 8, 5], [1, 3, 3, 2], 0),
        ([8, 8], [9, 1], 8),
        # There is no other minibatch to compare with.
        ([8], [9], 0),
        ([], [], 0),
    ],
)
def test_first_minibatches_of_a_size_are_no_longer_than_most(
    sizes: list[int], seconds: list[float], startup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    batches = [(torch.zeros(size, 2), torch.zeros(size)) for size in sizes]

    def read() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        nonlocal now
        for batch, duration in zip(batches, seconds, strict=True):
            now += duration / 2
            yield batch

    watch, yielded = Stopwatch(), []
    for batch, duration in zip(watch.timed(read()), seconds, strict=False):
        yielded.append(batch)
        now += duration / 2
    assert yielded == batches
    assert watch.startup == startup

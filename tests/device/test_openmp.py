"""Threads of OpenMP."""

from __future__ import annotations

import os
import sys
import time
from threading import Thread

import pytest
import torch

from hfusion.device.openmp import _nothing, _pause, release_team, torch_threads


def threads_of_process() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_thread_that_waits_keeps_no_team() -> None:
    if _pause() is _nothing:
        pytest.skip("torch computes by another runtime than GNU's")
    counts, remaining, sums = [], [], []

    def compute() -> None:
        with torch_threads(2):
            for _ in range(2):
                before = threads_of_process()
                sums.append(torch.ones(1 << 20, dtype=torch.float64).mul_(2).sum().item())
                counts.append(threads_of_process() - before)
                release_team()
                # A thread leaves the table a moment after the runtime has seen it end.
                for _ in range(100):
                    if threads_of_process() == before:
                        break
                    time.sleep(0.05)
                remaining.append(threads_of_process() - before)

    thread = Thread(target=compute)
    thread.start()
    thread.join()
    assert counts == [1, 1]
    assert remaining == [0, 0]
    assert sums == [2.0 * (1 << 20)] * 2

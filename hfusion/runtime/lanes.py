"""A device at work: three lanes that run at the same time, one that computes and two that copy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from hfusion.runtime.memory import Ledger


class Lanes:
    """A logical device: its ledger, and a thread for each direction of copying. Compute runs in its worker's thread.

    On CUDA each lane has a stream of its own, and waits for what it has issued before it says it is done.
    """

    def __init__(self, ledger: Ledger, device: torch.device, threads: int) -> None:
        self.ledger = ledger
        self.device = device
        self._threads = threads
        self._into = ThreadPoolExecutor(1, f"{ledger.name} in")
        self._out = ThreadPoolExecutor(1, f"{ledger.name} out")
        cuda = device.type == "cuda"
        # Kept: torch's allocator has a pool of memory for every stream.
        self._streams = {lane: torch.cuda.Stream(device) if cuda else None for lane in ("in", "compute", "out")}

    @property
    def name(self) -> str:
        return self.ledger.name

    def into(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` in the lane from the host, after those before it."""
        return self._into.submit(self._on_stream, "in", job)

    def out(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` in the lane to the host, after those before it."""
        return self._out.submit(self._on_stream, "out", job)

    def compute(self, job: Callable[[], None]) -> None:
        """Run ``job`` in this thread, as the device's compute lane, until it has come to its end there."""
        self._on_stream("compute", job)

    def close(self) -> None:
        """Wait for what runs, drop what waits; no thread is left."""
        self._into.shutdown(wait=True, cancel_futures=True)
        self._out.shutdown(wait=True, cancel_futures=True)

    def _on_stream(self, lane: str, job: Callable[[], None]) -> None:
        # A new thread begins with its own number of threads, and kernels may round by it.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        stream = self._streams[lane]
        if stream is None:
            job()
            return
        with torch.cuda.stream(stream):
            job()
            stream.synchronize()

"""A device at work: it computes in its worker's thread, and copies beside that both ways."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from hfusion.device.backend import backend
from hfusion.runtime.copying import copiers
from hfusion.runtime.memory import Ledger


class Lanes:
    """A logical device: its ledger, and who copies to it (``into``) and from it (``out``).

    ``later`` runs what must wait for room before it can be copied. Each lane has a queue of the device for itself, and
    ``compute`` waits for what it has asked for.
    """

    def __init__(self, ledger: Ledger, device: torch.device, threads: int) -> None:
        self.ledger = ledger
        self.device = device
        self._threads = threads
        self.into, self.out = copiers(ledger.name, device, threads)
        self.later = ThreadPoolExecutor(1, f"{ledger.name} later")
        self._queue = backend(device).queue()

    @property
    def name(self) -> str:
        return self.ledger.name

    def compute(self, job: Callable[[], None]) -> None:
        """Run ``job`` in this thread, as the device's compute lane, until it has come to its end there."""
        # A new thread begins with its own number of threads, and kernels may round by it.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        try:
            self._queue.run(job)
        finally:
            # Also after an error: nothing writes to what is read then.
            self._queue.wait()

    def close(self) -> None:
        """Wait for what runs, drop what waits; no thread is left."""
        self.later.shutdown(wait=True, cancel_futures=True)
        self.into.close()
        self.out.close()

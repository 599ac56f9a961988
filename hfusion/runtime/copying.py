"""Memory copies between two storages, or two contiguous tensors of one dtype, and waiting for copies to the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from hfusion.device.backend import backend
from hfusion.device.device_queues import Mark


class Move(NamedTuple):
    """A copy: source and destination."""

    target: Any
    source: Any


def copy_now(moves: Iterable[Move]) -> None:
    """Make the copies. On an accelerator they are queued in this thread's stream."""
    for target, source in moves:
        target.copy_(source, non_blocking=True)


class Arrivals:
    """Asynchronous copies to the host, by name, and when the last of each has arrived."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark | None] = {}

    def note(self, name: str, device: torch.device) -> None:
        """Note a copy that was queued in this thread's queue of ``device``."""
        self._marks[name] = backend(device).mark()

    def wait(self, name: str) -> None:
        """Wait for the last copy of this name, if there is one."""
        mark = self._marks.pop(name, None)
        if mark is not None:
            mark.wait()

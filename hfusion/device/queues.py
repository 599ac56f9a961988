"""Queues of work of a device, as `hfusion.device.backend` gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Queue(Protocol):
    """Work that a device does in the order in which it is asked for, beside that of its other queues."""

    def run(self, job: Callable[[], None]) -> None:
        """Call ``job``; the operators that it calls belong to this queue. They may be done later."""

    def wait(self) -> None:
        """Until all of it is done."""


@dataclass(frozen=True)
class HostQueue:
    """The queue of a host: what it is asked for is done when it has been asked."""

    def run(self, job: Callable[[], None]) -> None:
        job()

    def wait(self) -> None:
        return


@dataclass(frozen=True)
class StreamQueue:
    stream: torch.Stream

    def run(self, job: Callable[[], None]) -> None:
        with self.stream:
            job()

    def wait(self) -> None:
        self.stream.synchronize()


@dataclass(frozen=True)
class DeviceQueue:
    """The one queue of a device that has no others."""

    device: torch.device

    def run(self, job: Callable[[], None]) -> None:
        job()

    def wait(self) -> None:
        torch.accelerator.synchronize(self.device)

"""Messages of the processes of a cluster to the driver, and what the driver asks of any kind of process."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hfusion.cluster.serialization import pack_message
from hfusion.core.errors import HFusionError
from hfusion.device.calibrate import Rates
from hfusion.device.forked_worker import Failure

if TYPE_CHECKING:
    from hfusion.cluster.node import ArrayJob, CallJob, Message


@dataclass(frozen=True)
class DeviceInfo:
    """A device, as its process reports it. ``node``, ``process``: host name and pid."""

    name: str
    physical: torch.device
    budget: int
    rates: Rates
    node: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)

    @property
    def log_fields(self) -> dict[str, object]:
        """Return the process, node and device as fields for a log line."""
        return {"process": self.process, "node": self.node, "device": self.name}


@dataclass(frozen=True)
class Answered:
    """The answer to a `CallJob`."""

    value: Any


def failure(error: BaseException) -> Failure:
    """Return an error as a message, with its traceback. If it cannot be pickled, its text arrives."""
    return Failure(error, pack_message)


@dataclass(frozen=True)
class Lost:
    """The process is gone, or cannot be reached."""

    reason: str


class DeviceLost(HFusionError):
    """An array lost its processes more often than the cluster allows, or no remaining device has room for it."""


# The interface of a cluster's driver to its workers, for any kind of process.


class Executor(Protocol):
    """One worker process per device, for the whole run. A device is identified by its index in ``devices``.

    ``timeout``: how many seconds an array waits if no device can train it.
    """

    timeout: float

    @property
    def devices(self) -> Sequence[DeviceInfo]: ...

    @property
    def starting(self) -> bool:
        """True if the process of another device is starting, so that the device will join soon."""

    def put(self, value: Any) -> Any:
        """Store an object once per node for all processes. Return a reference to it, for ``job.parts``."""

    def start_job(self, device: int, job: ArrayJob | CallJob) -> None:
        """Start a job, such as training an array, on an idle device."""

    def answer(self, device: int, members: list[int]) -> None:
        """Answer the `StopQuery` of the array on a device with the members that stop."""

    def wait(self, seconds: float) -> list[tuple[int, Message]]:
        """Wait up to ``seconds`` for messages; return each with the index of its device, or an empty list.

        A `DeviceInfo` says that a device has joined, and is now the last of ``devices``.
        """

    def revive(self, device: int) -> bool:
        """Restart the lost process of a device; return whether it runs again."""

    def close(self) -> None:
        """End all processes and remove their files."""

"""The interface of a cluster's driver to its workers, for any kind of process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hfusion.cluster.messages import DeviceInfo
from hfusion.cluster.node import ArrayJob, CallJob, Message


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

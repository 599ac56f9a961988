"""The interface of a cluster's driver to its workers, for any kind of process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hfusion.cluster.messages import DeviceInfo
from hfusion.cluster.node import ArrayJob, CallJob, Message


class Executor(Protocol):
    """Processes that live as long as the run, one for each device. Devices are numbers, indices of ``devices``.

    ``timeout``: for how many seconds an array waits while no device can train it.
    """

    timeout: float

    @property
    def devices(self) -> Sequence[DeviceInfo]: ...

    @property
    def offsets(self) -> Sequence[float]:
        """Seconds by which the clock of each device is ahead of the driver's."""

    @property
    def starting(self) -> bool:
        """Whether a device will join soon, as its process starts."""

    def put(self, value: Any) -> Any:
        """Keep a part for all processes, once per node: what finds it, for ``job.parts``."""

    def begin(self, device: int, job: ArrayJob | CallJob) -> None:
        """Let a device do something that does nothing now, such as to train an array."""

    def leave(self, device: int, name: str) -> None:
        """Ask the array of this name to leave the device that trains it, where it is saved next to go on elsewhere."""

    def answer(self, device: int, members: list[int]) -> None:
        """Answer what an array asked: who of its members stops."""

    def wait(self, seconds: float) -> list[tuple[int, Message]]:
        """Wait up to ``seconds`` for messages; return each with the index of its device, or an empty list.

        A `DeviceInfo` says that a device has joined, and is now the last of ``devices``.
        """

    def revive(self, device: int) -> bool:
        """Restart the lost process of a device; return whether it runs again."""

    def close(self) -> None:
        """Nothing is left of it: neither processes nor files."""

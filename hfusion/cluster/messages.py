"""Messages between the processes of a cluster and its driver, and how objects of a script are pickled for them."""

from __future__ import annotations

import io
import os
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hfusion.core.errors import HFusionError, PlanError
from hfusion.device.calibrate import Rates
from hfusion.device.worker_process import is_plain_tensor, tensor_as_bytes

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


# Serialization for other processes, without the objects that these already have.


def pack(name: str, value: Any, parts: Mapping[int, str]) -> bytes:
    """Pickle ``value``, with objects whose id is in ``parts`` replaced by their key. PlanErrors call it ``name``."""
    try:
        from cloudpickle import Pickler
    except ImportError as error:
        raise ImportError("hf.Cluster needs cloudpickle: pip install cloudpickle (extra: hfusion[cluster])") from error
    target = io.BytesIO()

    class Packer(Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: object) -> str | None:
            return parts.get(id(obj))

        def reducer_override(self, obj: Any) -> Any:
            return tensor_as_bytes(obj) if is_plain_tensor(obj) else super().reducer_override(obj)

    try:
        Packer(target).dump(value)
    except Exception as error:
        raise PlanError(
            f"{name} cannot go to another process, as pickle fails: {type(error).__name__}: {error}; leave out what "
            "only this process has, such as open files, locks and generators"
        ) from error
    return target.getvalue()


_NO_PARTS: dict[str, Any] = {}


def unpack(data: bytes, part: Callable[[str], Any] = _NO_PARTS.__getitem__) -> Any:
    """Unpickle the bytes of `pack`; ``part(key)`` returns the objects that were left out."""

    class Unpacker(pickle.Unpickler):
        def persistent_load(self, key: str) -> Any:
            return part(key)

    return Unpacker(io.BytesIO(data)).load()

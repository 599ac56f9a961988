"""Messages of the processes of a cluster to the driver."""

from __future__ import annotations

import os
import socket
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from hfusion.cluster.serialization import pack_message, unpack_message
from hfusion.core.errors import HFusionError
from hfusion.device.calibrate import Rates


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
class Raised:
    """Training raised ``error``.

    The driver receives it with the traceback as a note. If it cannot be pickled or unpickled, the driver receives a
    RuntimeError with the same text.
    """

    error: BaseException

    def __reduce__(self) -> Any:
        try:
            data = pack_message(self.error)
        except Exception:
            data = None
        return _raised, (data, type(self.error).__name__, str(self.error), traceback.format_exception(self.error))


def _raised(data: bytes | None, kind: str, text: str, lines: list[str]) -> Raised:
    error: BaseException = RuntimeError(f"{kind}: {text}")
    # An exception class may fail, or change its text, when it is unpickled.
    with suppress(Exception):
        original = None if data is None else unpack_message(data)
        if isinstance(original, BaseException) and type(original).__name__ == kind and str(original) == text:
            error = original
    error.add_note("on the node:\n" + "".join(lines))
    return Raised(error)


@dataclass(frozen=True)
class Lost:
    """The process is gone, or cannot be reached."""

    reason: str


class DeviceLost(HFusionError):
    """An array lost its processes more often than the cluster allows, or no remaining device has room for it."""

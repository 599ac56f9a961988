"""Messages between the processes of a cluster and its driver, how they are pickled, and what a worker can be asked."""

from __future__ import annotations

import io
import os
import pickle
import socket
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hfusion.core.errors import HFusionError, PlanError
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


# Serialization for other processes, without the objects that these already have.


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError("hf.Cluster needs cloudpickle: pip install cloudpickle (extra: hfusion[cluster])") from error
    return cloudpickle


def pack(name: str, value: Any, parts: Mapping[int, str]) -> bytes:
    """Pickle ``value``, with objects whose id is in ``parts`` replaced by their key. PlanErrors call it ``name``."""
    return pack_with_keys(name, value, parts)[0]


def pack_with_keys(name: str, value: Any, parts: Mapping[int, str]) -> tuple[bytes, set[str]]:
    """Return the bytes as from `pack`, and the keys of the parts that were left out."""
    pickler: Any = _cloudpickle().Pickler
    target, keys = io.BytesIO(), set[str]()

    class Packer(pickler):  # type: ignore[misc]
        def persistent_id(self, obj: object) -> str | None:
            key = parts.get(id(obj))
            if key is not None:
                keys.add(key)
            return key

        def reducer_override(self, obj: Any) -> Any:
            return _as_bytes(obj) if _is_plain(obj) else super().reducer_override(obj)

    try:
        Packer(target).dump(value)
    except Exception as error:
        raise PlanError(
            f"{name} cannot go to another process, as pickle fails: {type(error).__name__}: {error}; leave out what "
            "only this process has, such as open files, locks and generators"
        ) from error
    return target.getvalue(), keys


def _is_plain(value: object) -> bool:
    """Return whether a value is a tensor that its bytes, dtype and shape describe."""
    if type(value) not in (Tensor, nn.Parameter) or not isinstance(value, Tensor):
        return False
    if not (value.is_cpu and value.is_leaf and value.layout is torch.strided and value.is_contiguous()):
        return False
    if value.is_quantized or value.is_conj() or value.is_neg() or vars(value) or value._backward_hooks:
        return False
    return 0 < value.nbytes == value.untyped_storage().nbytes()


def _as_bytes(tensor: Tensor) -> tuple[Any, ...]:
    """Reduce a plain tensor to its bytes. torch's own reduction takes ten times as long for small ones."""
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return _of_bytes, (data, tensor.dtype, tensor.shape, tensor.requires_grad, type(tensor) is nn.Parameter)


def _of_bytes(data: bytes, dtype: torch.dtype, shape: torch.Size, trained: bool, is_parameter: bool) -> Tensor:
    # The clone is in memory allocated by torch, with the usual alignment of tensors.
    tensor = torch.frombuffer(bytearray(data), dtype=dtype).clone().reshape(shape)
    return nn.Parameter(tensor, trained) if is_parameter else tensor.requires_grad_(trained)


def _no_parts(key: str) -> Any:
    raise KeyError(key)


def unpack(data: bytes, part: Callable[[str], Any] = _no_parts) -> Any:
    """Unpickle the bytes of `pack`; ``part(key)`` returns the objects that were left out."""

    class Unpacker(pickle.Unpickler):
        def persistent_load(self, key: str) -> Any:
            return part(key)

    return Unpacker(io.BytesIO(data)).load()


def pack_message(message: Any) -> bytes:
    """Pickle a message for another process, which must have the classes of its objects.

    Classes and functions that cloudpickle recreated from a script cannot be imported here. They are pickled by name,
    and looked up in the process that reads the message.
    """
    target = io.BytesIO()
    _MessagePickler(target).dump(message)
    return target.getvalue()


def unpack_message(data: bytes) -> Any:
    """Unpickle the bytes of `pack_message`. Raises AttributeError or ImportError for names that are not found here."""
    return pickle.loads(data)


class _MessagePickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if _is_plain(value):
            return _as_bytes(value)
        if isinstance(value, type | types.FunctionType):
            module, name = value.__module__, value.__qualname__
            try:
                is_original = _named(module, name) is value
            except (AttributeError, ImportError):
                is_original = False
            if not is_original:
                return _named, (module, name)
        return NotImplemented


def _named(module: str, name: str) -> Any:
    """Return the class or function of this process with this module and qualified name."""
    return attrgetter(name)(import_module(module))

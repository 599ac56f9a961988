"""Serialization for other processes, without the parts that these already have."""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.core.errors import PlanError


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError("hf.Cluster needs cloudpickle: pip install cloudpickle (extra: hfusion[cluster])") from error
    return cloudpickle


def pack(what: str, value: Any, parts: Mapping[int, str]) -> bytes:
    """``value`` as bytes; an object whose id is in ``parts`` as its key there. Raises PlanError with ``what``."""
    return pack_with_keys(what, value, parts)[0]


def pack_with_keys(what: str, value: Any, parts: Mapping[int, str]) -> tuple[bytes, set[str]]:
    """Return what `pack` returns, and the keys of the parts that it left out."""
    target = io.BytesIO()
    keys = _dump(what, value, parts, target)
    return target.getvalue(), keys


def _dump(what: str, value: Any, parts: Mapping[int, str], target: Any) -> set[str]:
    pickler: Any = _cloudpickle().Pickler
    keys: set[str] = set()

    class Packer(pickler):  # type: ignore[misc]
        def persistent_id(self, found: object) -> str | None:
            key = parts.get(id(found))
            if key is not None:
                keys.add(key)
            return key

        def reducer_override(self, found: Any) -> Any:
            return _as_bytes(found) if _is_plain(found) else super().reducer_override(found)

    try:
        Packer(target).dump(value)
    except Exception as error:
        raise PlanError(
            f"{what} cannot go to another process, as pickle fails: {type(error).__name__}: {error}; leave out what "
            "only this process has, such as open files, locks and generators"
        ) from error
    return keys


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
    """Reduce a plain tensor: torch's own way takes ten times as long for small ones."""
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return _of_bytes, (data, tensor.dtype, tensor.shape, tensor.requires_grad, type(tensor) is nn.Parameter)


def _of_bytes(data: bytes, dtype: torch.dtype, shape: torch.Size, trained: bool, is_parameter: bool) -> Tensor:
    # A copy in memory of torch's own, which is aligned as that of any other tensor.
    tensor = torch.frombuffer(bytearray(data), dtype=dtype).clone().reshape(shape)
    return nn.Parameter(tensor, trained) if is_parameter else tensor.requires_grad_(trained)


class _Counter:
    """A file that only counts what is written."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.count += size
        return size


def packed_bytes(what: str, value: Any) -> int:
    """Return how many bytes ``value`` is packed. Raises as `pack`."""
    counter = _Counter()
    _dump(what, value, {}, counter)
    return counter.count


def _no_parts(key: str) -> Any:
    raise KeyError(key)


def unpack(data: bytes, part: Callable[[str], Any] = _no_parts) -> Any:
    """Return the unpacked object; ``part`` gives omitted parts by key."""

    class Unpacker(pickle.Unpickler):
        def persistent_load(self, key: str) -> Any:
            return part(key)

    return Unpacker(io.BytesIO(data)).load()


def pack_message(message: Any) -> bytes:
    """A message of one process to another as bytes: numbers, tensors, and objects of classes that the other one has.

    Classes and functions that are not found here by their names, as cloudpickle recreates those of a script, are
    looked up by name where the message is read.
    """
    target = io.BytesIO()
    _MessagePickler(target).dump(message)
    return target.getvalue()


def unpack_message(data: bytes) -> Any:
    """The message of `pack_message`. Raises AttributeError or ImportError for names that this process lacks."""
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

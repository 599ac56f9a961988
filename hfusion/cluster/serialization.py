"""Serialization for other processes, without the objects that these already have."""

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

"""Conversion of nested plain values to JSON plus tensors, and back, without executing code.

Values that JSON cannot express are objects with the key ``~``: a tuple, a set, bytes, a number that is not finite. Each
value comes back with the type that it had: subclasses, whose code a save does not hold, are refused.
"""

from __future__ import annotations

import base64
import enum
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hfusion.core.errors import CheckpointError
from hfusion.optim.hyper import MemberVector

_MARK = "~"
# The supported dtypes of numpy scalars and arrays.
_NUMPY = frozenset(np.dtype(code).name for code in "?bhilqBHILQefdFD")
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_SEQUENCE_NAMES: dict[Any, str] = {made: name for name, made in _SEQUENCES.items()}
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str)}
# Tensor classes without state of their own; an optimizer's vectors are loaded as plain tensors.
_TENSORS = (Tensor, MemberVector)
# Base types that a value of a subclass can be converted to before it is saved.
_BASES = (int, float, complex, str, bytes, tuple, list, frozenset, set, Mapping)


def encode(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Return ``value`` as JSON. Its tensors are added to ``tensors``, with keys that begin with ``where``.

    Raises:
        CheckpointError: a value that is neither plain nor a tensor, or of a subclass of a plain type.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_MARK: "float", "v": repr(value)}
    if kind is complex:
        return {_MARK: "complex", "v": [encode(part, tensors, where) for part in (value.real, value.imag)]}
    if kind is bytes:
        return {_MARK: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and value.dtype.name in _NUMPY:
        return {_MARK: "number", "dtype": value.dtype.name, "v": encode(value.item(), tensors, where)}
    if kind is np.ndarray and value.dtype.name in _NUMPY and value.dtype.isnative:
        return {_MARK: "array", "v": _keep(torch.from_numpy(np.array(value, order="C")), tensors, where)}
    if kind in _TENSORS:
        return {_MARK: "tensor", "v": _keep(value.detach(), tensors, where)}
    if kind is nn.Parameter:
        held = _keep(value.detach(), tensors, where)
        return {_MARK: "parameter", "v": held, "requires_grad": value.requires_grad}
    return _encode_nest(value, tensors, where)


def _keep(tensor: Tensor, tensors: dict[str, Tensor], where: str) -> str:
    """Add a tensor to ``tensors`` under a unique key that begins with ``where``, and return the key."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = tensor.dtype if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise CheckpointError(f"{where} is a tensor that is {kind}: a checkpoint keeps plain dense ones")
    key, number = where, 0
    while key in tensors:
        key, number = f"{where}~{number}", number + 1
    tensors[key] = tensor
    return key


def _encode_nest(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    kind = type(value)
    if kind is dict:
        if all(type(key) is str for key in value) and _MARK not in value:
            return {key: encode(item, tensors, f"{where}/{key}") for key, item in value.items()}
        return {_MARK: "dict", "v": _encode_items(value, tensors, where)}
    if kind is list or kind in _SEQUENCE_NAMES:
        items = [encode(item, tensors, f"{where}/{n}") for n, item in enumerate(value)]
        return items if kind is list else {_MARK: _SEQUENCE_NAMES[kind], "v": items}
    if kind is Counter:
        return {_MARK: "counter", "v": _encode_items(value, tensors, where)}
    if kind is OrderedDict:
        # A torch state dict stores the versions of its modules in an attribute.
        attributes = encode(vars(value), tensors, f"{where}/attributes")
        return {_MARK: "ordered dict", "v": _encode_items(value, tensors, where), "attributes": attributes}
    if kind is defaultdict and value.default_factory in (None, *_FACTORIES.values()):
        factory = None if value.default_factory is None else value.default_factory.__name__
        return {_MARK: "defaultdict", "v": _encode_items(value, tensors, where), "factory": factory}
    raise CheckpointError(_refusal(value, where))


def _encode_items(value: Mapping[Any, Any], tensors: dict[str, Tensor], where: str) -> list[Any]:
    pairs = enumerate(value.items())
    return [[encode(key, tensors, where), encode(item, tensors, f"{where}/{n}")] for n, (key, item) in pairs]


def _refusal(value: Any, where: str) -> str:
    """Return the message that explains why a value cannot be saved, and what can be saved instead."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.ndarray | np.generic):
        kind += f" of {value.dtype}"
    if isinstance(value, defaultdict):
        kind += f" of {value.default_factory!r}"
    remedy = "keep plain values (numbers, strings, tensors, lists, dicts)"
    base = next((base for base in _BASES if isinstance(value, base)), None)
    if isinstance(value, enum.Enum):
        remedy = "give its .value"
    elif isinstance(value, Tensor):
        remedy = "give a plain tensor"
    elif base is not None:
        remedy = f"give {'dict' if base is Mapping else base.__name__}(...) of it"
    return f"{where} is of class {kind}, which only code can make again, and loading runs none: {remedy}"


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode` converted. Raises CheckpointError, or any error that malformed input causes."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    kind = value[_MARK]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decode(item, tensors) for item in value["v"]])
    if kind in _DECODERS:
        return _DECODERS[kind](value, tensors)
    raise CheckpointError(f"a value is marked as {kind!r}, which this version does not know")


def _decode_items(value: Any, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {decode(key, tensors): decode(item, tensors) for key, item in value["v"]}


def _decode_number(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if value["dtype"] not in _NUMPY:
        raise CheckpointError(f"a number is of dtype {value['dtype']!r}, which this version does not know")
    return np.dtype(value["dtype"]).type(decode(value["v"], tensors))


def _decode_ordered(value: Any, tensors: Mapping[str, Tensor]) -> OrderedDict[Any, Any]:
    ordered = OrderedDict(_decode_items(value, tensors))
    vars(ordered).update(decode(value["attributes"], tensors))
    return ordered


def _decode_default(value: Any, tensors: Mapping[str, Tensor]) -> defaultdict[Any, Any]:
    factory = None if value["factory"] is None else _FACTORIES[value["factory"]]
    return defaultdict(factory, _decode_items(value, tensors))


_DECODERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "float": lambda value, _: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value["v"]],
    "complex": lambda value, tensors: complex(*decode(value["v"], tensors)),
    "bytes": lambda value, _: base64.b64decode(value["v"], validate=True),
    "number": _decode_number,
    "tensor": lambda value, tensors: tensors[value["v"]],
    "parameter": lambda value, tensors: nn.Parameter(tensors[value["v"]], requires_grad=value["requires_grad"]),
    "array": lambda value, tensors: tensors[value["v"]].numpy(),
    "dict": _decode_items,
    "counter": lambda value, tensors: Counter(_decode_items(value, tensors)),
    "ordered dict": _decode_ordered,
    "defaultdict": _decode_default,
}

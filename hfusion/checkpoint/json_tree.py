"""Conversion of nested plain values to JSON plus tensors, and back, without executing code.

Values that JSON cannot express are objects with the key ``~``, the kind, and ``v``, what the value is made from: a
tuple, a set, bytes, a number that is not finite. Each value comes back with the type that it had: subclasses, whose
code a save does not hold, are refused.
"""

from __future__ import annotations

import base64
import enum
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hfusion.core.errors import CheckpointError
from hfusion.optim.hyper import MemberVector

_MARK = "~"
# The supported dtypes of numpy scalars and arrays.
_NUMPY = frozenset(np.dtype(code).name for code in "?bhilqBHILQefdFD")
_FACTORIES: dict[Any, Any] = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str)}
_FACTORIES[None] = None
# Tensor classes without state of their own; an optimizer's vectors are loaded as plain tensors.
_TENSORS = (Tensor, MemberVector)
# Base types that a value of a subclass can be converted to before it is saved.
_BASES = (int, float, complex, str, bytes, tuple, list, frozenset, set, Mapping)


class _CodedType(NamedTuple):
    """A type that JSON lacks: ``split`` gives what `encode` takes, ``join`` makes the value from that again."""

    type: type
    split: Callable[[Any], Any]
    join: Callable[[Any], Any]


def _pairs(value: Mapping[Any, Any]) -> list[Any]:
    return [[key, item] for key, item in value.items()]


def _ordered(parts: Any) -> OrderedDict[Any, Any]:
    # A torch state dict stores the versions of its modules in an attribute.
    ordered, attributes = OrderedDict(parts[0]), parts[1]
    vars(ordered).update(attributes)
    return ordered


def _numpy_number(parts: Any) -> Any:
    if parts[0] not in _NUMPY:
        raise CheckpointError(f"a number is of dtype {parts[0]!r}, which this version does not know")
    return np.dtype(parts[0]).type(parts[1])


_KINDS = {
    "float": _CodedType(float, repr, {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__),
    "complex": _CodedType(complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "bytes": _CodedType(
        bytes, lambda value: base64.b64encode(value).decode(), lambda text: base64.b64decode(text, validate=True)
    ),
    "tuple": _CodedType(tuple, list, tuple),
    "set": _CodedType(set, list, set),
    "frozenset": _CodedType(frozenset, list, frozenset),
    "size": _CodedType(torch.Size, list, torch.Size),
    "dict": _CodedType(dict, _pairs, dict),
    "counter": _CodedType(Counter, _pairs, lambda pairs: Counter(dict(pairs))),
    "ordered dict": _CodedType(OrderedDict, lambda value: [_pairs(value), vars(value)], _ordered),
    "defaultdict": _CodedType(
        defaultdict,
        lambda value: [getattr(value.default_factory, "__name__", None), _pairs(value)],
        lambda parts: defaultdict(_FACTORIES[parts[0]], parts[1]),
    ),
    "number": _CodedType(np.generic, lambda value: [value.dtype.name, value.item()], _numpy_number),
    "array": _CodedType(
        np.ndarray, lambda value: torch.from_numpy(np.array(value, order="C")), lambda tensor: tensor.numpy()
    ),
    "parameter": _CodedType(
        nn.Parameter,
        lambda value: [value.detach(), value.requires_grad],
        lambda parts: nn.Parameter(parts[0], requires_grad=parts[1]),
    ),
}
_NAMES: dict[type, str] = {kind.type: name for name, kind in _KINDS.items()}


def encode(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Return ``value`` as JSON. Its tensors are added to ``tensors``, with keys that begin with ``where``.

    Raises:
        CheckpointError: a value that is neither plain nor a tensor, or of a subclass of a plain type.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind in _TENSORS:
        return {_MARK: "tensor", "v": _keep(value.detach(), tensors, where)}
    if kind is list:
        return [encode(item, tensors, f"{where}/{number}") for number, item in enumerate(value)]
    if kind is dict and all(type(key) is str for key in value) and _MARK not in value:
        return {key: encode(item, tensors, f"{where}/{key}") for key, item in value.items()}
    name = _NAMES.get(np.generic if isinstance(value, np.generic) else kind)
    of_numpy = isinstance(value, np.generic | np.ndarray)
    is_foreign = of_numpy and not (value.dtype.name in _NUMPY and value.dtype.isnative)
    if name is None or is_foreign or (kind is defaultdict and value.default_factory not in _FACTORIES.values()):
        raise CheckpointError(_refusal(value, where))
    return {_MARK: name, "v": encode(_KINDS[name].split(value), tensors, where)}


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
    name = value[_MARK]
    if name == "tensor":
        return tensors[value["v"]]
    if name not in _KINDS:
        raise CheckpointError(f"a value is marked as {name!r}, which this version does not know")
    return _KINDS[name].join(decode(value["v"], tensors))

"""Nests of plain values as JSON, with their tensors beside it; and back, without running anything.

What JSON has no word for is an object with the key ``~``: a tuple, a set, bytes, a number that is not finite.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hfusion.core.errors import CheckpointError

_MARK = "~"


def encode(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """``value`` as JSON; its tensors go into ``tensors`` under ``where`` and their places in it.

    Raises:
        CheckpointError: a value that is neither plain nor a tensor.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), tensors, where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_MARK: "float", "v": repr(float(value))}
    if isinstance(value, Tensor):
        return {_MARK: "tensor", "v": _keep(value.detach(), tensors, where)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {_MARK: "array", "v": _keep(torch.from_numpy(np.ascontiguousarray(value).copy()), tensors, where)}
    if isinstance(value, bytes):
        return {_MARK: "bytes", "v": base64.b64encode(value).decode()}
    return _encode_nest(value, tensors, where)


def _keep(tensor: Tensor, tensors: dict[str, Tensor], where: str) -> str:
    """The key under which a tensor is kept: one of its own, whatever keys with slashes there are."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = tensor.dtype if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise CheckpointError(f"{where} is a tensor that is {kind}: a checkpoint keeps plain dense ones")
    key, number = where, 0
    while key in tensors:
        key, number = f"{where}~{number}", number + 1
    tensors[key] = tensor
    return key


def _encode_nest(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        if kind == "dict" and all(isinstance(key, str) for key in value) and _MARK not in value:
            return {key: encode(item, tensors, f"{where}/{key}") for key, item in value.items()}
        found = [
            [encode(key, tensors, where), encode(item, tensors, f"{where}/{number}")]
            for number, (key, item) in enumerate(value.items())
        ]
        return {_MARK: kind, "v": found}
    if isinstance(value, list | tuple | set | frozenset):
        items = [encode(item, tensors, f"{where}/{n}") for n, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {_MARK: "tuple" if isinstance(value, tuple) else "set", "v": items}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.ndarray):
        kind += f" of {value.dtype}"
    raise CheckpointError(
        f"{where} is a {kind}, which only code can make again, and "
        "loading a checkpoint runs none: keep plain values (numbers, strings, tensors, lists, dicts)"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode` was given. Raises CheckpointError, or whatever meets a value that it has not made."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    kind, held = value[_MARK], value["v"]
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[held]
    if kind in ("tensor", "array"):
        return tensors[held] if kind == "tensor" else tensors[held].numpy()
    if kind == "bytes":
        return base64.b64decode(held, validate=True)
    if kind in ("dict", "counter"):
        pairs = {decode(key, tensors): decode(item, tensors) for key, item in held}
        return Counter(pairs) if kind == "counter" else pairs
    if kind in ("tuple", "set"):
        items = [decode(item, tensors) for item in held]
        return tuple(items) if kind == "tuple" else set(items)
    raise CheckpointError(f"a value is marked as {kind!r}, which this version does not know")

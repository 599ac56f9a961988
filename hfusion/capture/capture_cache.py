"""Cache of the captures of this process: models that are equal in all that forward can read share one graph.

A sweep that fuses one class many times thus exports it once. A cached graph is checked against the code like a new
one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.core.fingerprint import read_model, tensors_of
from hfusion.core.program import Capture

# The most recently used captures are kept, up to this number.
MAX_CAPTURES = 64

_captures: OrderedDict[Any, Capture] = OrderedDict()


def capture_key(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], opened: Sequence[tuple[bool, Any]]
) -> Any:
    """Return the cache key of a capture of ``module`` with these arguments; None if it cannot be cached.

    ``opened``: for each export attempt, whether the first dim varies, and which other dims of each leaf vary.
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    ids = [id(leaf) for leaf in leaves]
    kinds = [_kind(leaf) for leaf in leaves]
    state = read_model(module, [leaf for leaf in leaves if not isinstance(leaf, Tensor)])
    # Unregistered tensors of a model belong to it alone, and must not be kept alive by the cache.
    if state is None or any(True for _ in tensors_of(state)):
        return None
    # If one tensor is passed as two arguments, a write into one changes the other.
    ties = [ids.index(leaf_id) for leaf_id in ids]
    return (
        state,
        str(spec),
        tuple(kinds),
        tuple(ties),
        tuple((first, tuple(map(tuple, map(sorted, dims)))) for first, dims in opened),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    kind = (type(leaf), tuple(leaf.shape), leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad)
    return (*kind, leaf.stride() if leaf.layout is torch.strided else None, leaf.is_conj(), leaf.is_neg())


def find_capture(key: Any) -> Capture | None:
    if key is None or key not in _captures:
        return None
    _captures.move_to_end(key)
    return _captures[key]


def keep_capture(key: Any, captured: Capture) -> None:
    if key is not None:
        _captures[key] = captured
        if len(_captures) > MAX_CAPTURES:
            _captures.popitem(last=False)


def forget_capture(key: Any) -> None:
    _captures.pop(key, None)

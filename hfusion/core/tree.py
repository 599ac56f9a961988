"""Trees of lists, tuples and mappings: arguments of calls, values of graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Kind: TypeAlias = type | tuple[type, ...]


def leaves(tree: Any, kind: Kind) -> Iterator[Any]:
    """Yield the items of ``kind`` in a tree, in order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from leaves(item, kind)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from leaves(item, kind)


def contains(tree: Any, kind: Kind) -> bool:
    """Return whether a tree contains an item of ``kind``."""
    return any(True for _ in leaves(tree, kind))


def map_leaves(tree: Any, kind: Kind, fn: Callable[[Any], Any]) -> Any:
    """Return the tree with ``fn`` applied to every item of ``kind``; lists and tuples keep their class."""
    if isinstance(tree, kind):
        return fn(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(item, kind, fn) for item in tree)
    if isinstance(tree, Mapping):
        return {name: map_leaves(item, kind, fn) for name, item in tree.items()}
    return tree


# Registration with `torch.utils._pytree` of dataclasses that hold tensors, at first use.

_lock = threading.Lock()


def know_dataclasses(values: Any) -> None:
    """Let torch look into the dataclasses among nested ``values``, as `torch.export.register_dataclass` does.

    Only into those that hold tensors and are all that their fields are: torch makes others of the fields alone.
    """
    for leaf in pytree.tree_leaves(values):
        if is_dataclass(leaf) and not isinstance(leaf, type) and _is_its_fields(leaf):
            parts = {field.name: getattr(leaf, field.name) for field in fields(leaf)}
            know_dataclasses(parts)
            if any(isinstance(part, Tensor) for part in pytree.tree_leaves(parts)):
                with _lock:
                    if type(leaf) not in pytree.SUPPORTED_NODES:
                        torch.export.register_dataclass(type(leaf))


def _is_its_fields(value: Any) -> bool:
    names = {field.name for field in fields(value) if field.init}
    if not getattr(value, "__dict__", {}).keys() <= names or not all(hasattr(value, name) for name in names):
        return False
    try:
        type(value)(**{name: getattr(value, name) for name in names})
    except Exception:
        # Its own __init__ or __post_init__ wants something else.
        return False
    return True

"""Trees of lists, tuples and mappings: arguments of calls, values of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

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

"""Nests of lists, tuples and mappings: arguments of calls, values of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

Kind: TypeAlias = type | tuple[type, ...]


def leaves(nest: Any, kind: Kind) -> Iterator[Any]:
    """The items of ``kind`` in a nest, in order."""
    if isinstance(nest, kind):
        yield nest
    elif isinstance(nest, list | tuple):
        for item in nest:
            yield from leaves(item, kind)
    elif isinstance(nest, Mapping):
        for item in nest.values():
            yield from leaves(item, kind)


def holds(nest: Any, kind: Kind) -> bool:
    """Whether an item of ``kind`` stands in a nest."""
    return any(True for _ in leaves(nest, kind))


def change(nest: Any, kind: Kind, fn: Callable[[Any], Any]) -> Any:
    """The nest with ``fn`` applied to every item of ``kind``; lists and tuples keep their class."""
    if isinstance(nest, kind):
        return fn(nest)
    if isinstance(nest, list | tuple):
        return type(nest)(change(item, kind, fn) for item in nest)
    if isinstance(nest, Mapping):
        return {name: change(item, kind, fn) for name, item in nest.items()}
    return nest

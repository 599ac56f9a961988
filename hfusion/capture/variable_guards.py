"""Guards on the variables that forward's code names, since a graph holds their values as constants."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import nn

from hfusion.capture.reachable_code import MAX_DEPTH, MISSING, Attributes, GlobalVariables, Holder, search_of
from hfusion.core.python_values import (
    CONTAINERS,
    MAX_ITEMS,
    IdentityRef,
    array_bytes,
    container_key,
    items,
    own_attributes,
    size,
    slots,
)
from hfusion.core.torch_settings import asked_settings

_END, _LARGE = object(), object()
# Types of objects to which attributes are seldom added, and of which there are many.
_RARELY_GIVEN = (type, types.FunctionType, functools._lru_cache_wrapper)

Read: TypeAlias = Callable[[Any], Iterable[Any]]


class Variables:
    """The variables that the code of ``models`` names, with their values when this object was created.

    Args:
        without: names of variables to leave out.

    Attributes:
        names: all names in the code, also those that it passes to getattr.
        settings: the functions that read the settings of torch that the code may use.
        is_complete: whether all code within reach was searched.
    """

    def __init__(self, models: Sequence[nn.Module], without: frozenset[str] = frozenset()) -> None:
        self._groups: list[tuple[Read, Any, tuple[Any, ...]]] = []
        self.values: dict[str, Any] = {}
        search = search_of(models)
        self.holders, self.is_complete = search.holders, search.complete
        for holder in self.holders:
            self._add(holder, without)
        self.names, self.settings = search.all_names, asked_settings(search.all_names)

    def is_unchanged(self) -> bool:
        """Return whether all variables still hold the same objects, with the same items."""
        try:
            for read, held, values in self._groups:
                if not all(map(operator.is_, read(held), values)):
                    return False
        except Exception:
            return False
        return True

    def _add(self, holder: Holder, without: frozenset[str]) -> None:
        names = [name for name in sorted(holder.names) if f"{holder.title}{name}" not in without]
        values = [holder.read(name) for name in names]
        named = isinstance(holder, GlobalVariables) or (isinstance(holder, Attributes) and not slots(type(holder.held)))
        at_once = [name for name in names if named and holder.read(name) is not MISSING]
        rest = [name for name in names if name not in at_once]
        if at_once:
            read = [holder.read(name) for name in at_once]
            self._groups.append((*_reader(holder, at_once), (*read, read[-1])))
        if rest:
            self._groups.append((lambda names: map(holder.read, names), rest, tuple(map(holder.read, rest))))
        if isinstance(holder, Attributes) and not isinstance(holder.held, _RARELY_GIVEN):
            self._groups.append((_keys, holder.held, _keys(holder.held)))
        for name, value in zip(names, values, strict=True):
            self.values[f"{holder.title}{name}"] = content(value)
            self._groups += _items(value)


def _reader(holder: Holder, names: list[str]) -> tuple[Read, Any]:
    """Return a function that reads variables, and the dict that it reads them from."""
    held = holder.held
    # The last name is repeated: for a single name, the getter would not return a tuple.
    names = [*names, names[-1]]
    return operator.itemgetter(*names), held if isinstance(holder, GlobalVariables) else own_attributes(held)


def _items(value: Any, depth: int = MAX_DEPTH) -> Iterator[tuple[Read, Any, tuple[Any, ...]]]:
    """Yield readers and expected results for containers and arrays, which may be changed in place."""
    if (held := array_bytes(value)) is not None:
        yield functools.partial(_same_bytes, held), value, (held,)
    if not isinstance(value, CONTAINERS) or depth == 0:
        return
    if not isinstance(value, tuple | frozenset):
        yield _flat, value, _flat(value)
    if size(value) <= MAX_ITEMS:
        for _, _, item in items(value):
            yield from _items(item, depth - 1)


def _keys(value: Any) -> tuple[Any, ...]:
    """Return the names of the attributes of ``value``, to detect added ones."""
    return (*own_attributes(value), _END)


def _same_bytes(before: bytes, value: Any) -> tuple[bytes | None]:
    current = array_bytes(value)
    return (before if current == before else current,)


def _flat(value: Any) -> tuple[Any, ...]:
    """Return the items, or keys and values, and an end mark; only a mark for a large container."""
    if size(value) > MAX_ITEMS:
        return (_LARGE,)
    held = items(value)
    return (*(name for _, name, _ in held), *(item for _, _, item in held), _END)


def content(value: Any) -> Any:
    """Return a hashable form of a value: plain values, containers and small arrays by value, others by identity."""
    return container_key(value, _array_or_identity, MAX_DEPTH)


def _array_or_identity(value: Any) -> Any:
    held = array_bytes(value)
    return IdentityRef(value) if held is None else (type(value), held)

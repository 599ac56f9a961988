"""Walk the Python state that forward can keep between calls: compare it, put it back, and guard it."""

from __future__ import annotations

import functools
import itertools
import operator
import pickle
import random
import types
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from hfusion.capture.reachable_code import (
    MAX_DEPTH,
    MISSING,
    Attributes,
    CodeSearch,
    ContextVariable,
    GlobalVariables,
    Holder,
    search_of,
)
from hfusion.capture.registered_tensors import is_array
from hfusion.core.errors import FusionError
from hfusion.core.fingerprint import asked_settings, is_user_code
from hfusion.core.memory import same_values
from hfusion.core.python_values import (
    CONTAINERS,
    MAX_ITEMS,
    PLAIN,
    IdentityRef,
    Link,
    array_bytes,
    builtin_type,
    container_key,
    items,
    own_attributes,
    parts,
    plain_key,
    size,
    slots,
    walk,
)

MUTABLE_CONTAINERS = (list, dict, set, deque)
VALUES = (*PLAIN, *MUTABLE_CONTAINERS, Tensor)
_ATOMS = (*PLAIN, Tensor, type, types.ModuleType, types.BuiltinFunctionType)
# Most of the variables that code names; they compare as the same object.
CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
# Nested levels of containers whose items are compared.
_DEPTH = 3
# Size in bytes up to which the values of a tensor outside of the model are restored.
MAX_TENSOR_BYTES = 64 * 2**20
# How the state of a random generator is read and put back.
_STATES: dict[Any, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (lambda g: g.get_state().numpy(), lambda g, state: g.set_state(torch.from_numpy(state))),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)),
}
GENERATORS = tuple(_STATES)


@contextmanager
def restored(module: nn.Module, search: CodeSearch | None = None) -> Iterator[None]:
    """Context manager: restore the attributes of ``module`` and the variables outside of it that its code may change.

    Other variables are left alone, since they may belong to another thread. For tensors in attributes, the objects are
    restored, not their values; other objects in attributes belong to the module, which is a copy, and are not restored.
    A ``functools.lru_cache`` that got new entries meanwhile is cleared.

    Args:
        search: the `CodeSearch` of ``module``, if there is one already.
    """
    undo: list[Callable[[], object]] = []
    # Programs of an array are no state of a model.
    _remember([vars(part) for part in module.modules() if not is_array(part)], undo, {}, tensors=False)
    search = search or search_of([module])
    holders = search.holders
    visited: dict[int, Any] = {}
    for holder in holders:
        _remember_variables(holder, search.assigned, undo, visited)
    filled = _filled(holders)
    try:
        yield
    finally:
        for change in undo:
            change()
        for cache, misses in _filled(holders).items():
            if filled.get(cache) != misses:
                cache.cache_clear()


def variables(search: CodeSearch) -> dict[str, Any]:
    """Return the variables that the code names, and attributes that it may have added, by their full names.

    The values have the form that `comparable` returns.
    """
    return {
        f"{holder.title}{name}": comparable(holder.read(name))
        for holder in search.holders
        for name in holder.names | (_table(holder).keys() & search.assigned)
    }


def check_restorable(search: CodeSearch, changed: Collection[str]) -> None:
    """Raise a FusionError if one of the variables in ``changed`` is one that `restored` cannot put back."""
    for holder in search.holders if changed else ():
        for name in holder.names:
            value = holder.read(name)
            if f"{holder.title}{name}" in changed and isinstance(value, Iterator):
                raise FusionError(
                    f"forward takes values of {name}, an iterator outside of the model, and so do captures; give what "
                    "it yields as an argument of forward"
                )
            if f"{holder.title}{name}" in changed and isinstance(value, Tensor) and not _is_small(value):
                raise FusionError(
                    f"forward writes into {name}, a tensor of shape {tuple(value.shape)} outside of the model; "
                    "register it as a buffer of the model"
                )


def identity(value: Any) -> Any:
    """Return a key that is equal for equal plain values, and otherwise for the same object, or unchanged tensor."""
    if isinstance(value, CODE):
        return IdentityRef(value)
    if isinstance(value, PLAIN):
        return plain_key(value)
    if (held := array_bytes(value)) is not None:
        return IdentityRef(value), held
    if isinstance(value, Iterator):
        return IdentityRef(value), _position(value)
    if isinstance(value, GENERATORS):
        read, _ = _access(value)
        return IdentityRef(value), pickle.dumps(read(value))
    return IdentityRef(value), value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def change_back(item: Any) -> Callable[[], object] | None:
    """Return a function that restores the values of an array, or the state of a generator; None for anything else."""
    if isinstance(item, GENERATORS):
        read, write = _access(item)
        return functools.partial(write, item, read(item))
    if array_bytes(item) is not None and np.asarray(item).flags.writeable:
        return functools.partial(_fill_array, item, np.asarray(item).copy())
    return None


def _is_small(tensor: Tensor) -> bool:
    """Return whether the values of a tensor outside of the model are put back."""
    whole = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_inference()
    return whole and tensor.nbytes <= MAX_TENSOR_BYTES


def _refill_tensor(tensor: Tensor, version: int, held: Tensor) -> None:
    # Batch normalization updates its statistics without a new version.
    if tensor._version != version or not same_values(tensor, held):
        tensor.detach().copy_(held)


def _fill_array(value: Any, held: Any) -> None:
    np.asarray(value)[...] = held


def _position(iterator: Iterator[Any]) -> str:
    """Return a text that changes when the iterator advances, as far as Python shows that."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return "" if frame is None else f"{frame.f_lasti} {frame.f_locals}"
    if is_user_code(type(iterator).__module__):
        return ""
    # object.__reduce__ creates an object of the base class, which closes a file when it is deleted.
    if type(iterator).__reduce__ is object.__reduce__:
        return repr(iterator)
    with warnings.catch_warnings(action="ignore"):
        return f"{iterator} {iterator.__reduce__()}"


def _access(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    return next(access for kind, access in _STATES.items() if isinstance(generator, kind))


def comparable(value: Any) -> Any:
    """Return the `identity` of a value, or of the items of lists and similar containers."""
    return container_key(value, identity, _DEPTH)


def _remember(
    values: Iterable[Any], undo: list[Callable[[], object]], visited: dict[int, Any], tensors: bool = True
) -> None:
    """Add to ``undo`` functions that restore ``values``: the contents of containers, and of what is in them.

    Args:
        visited: keeps objects and so their ids.
        tensors: whether to restore the values of small tensors.
    """

    def visit(item: Any) -> list[Any]:
        if isinstance(item, Tensor) and tensors and _is_small(item):
            undo.append(functools.partial(_refill_tensor, item, item._version, item.detach().clone()))
        if isinstance(item, _ATOMS):
            return []
        if (change := change_back(item)) is not None:
            undo.append(change)
        elif isinstance(item, MUTABLE_CONTAINERS):
            undo.append(functools.partial(_refill, item, _entries(item)))
            if isinstance(held := own_attributes(item), dict):
                undo.append(functools.partial(_refill, held, _entries(held)))
            return [part for _, _, part in parts(item)]
        return [part for _, _, part in items(item)] if isinstance(item, tuple) else []

    walk(values, visit, visited)


def _entries(holder: Any) -> list[tuple[Any, ...]]:
    """Return the keys and values of a mapping, or each item of another container alone."""
    return [(name, item) if link is Link.KEY else (item,) for link, name, item in items(holder)]


def _refill(holder: Any, entries: list[tuple[Any, ...]]) -> None:
    """Restore the ``entries`` of a container by methods of Python's types, since a subclass may forbid changes."""
    present = itertools.chain.from_iterable(_entries(holder))
    if list(map(id, present)) != list(map(id, itertools.chain.from_iterable(entries))):
        base = builtin_type(holder)
        base.clear(holder)
        held = entries if issubclass(base, dict) else [item for (item,) in entries]
        (base.extend if base in (list, deque) else base.update)(holder, held)


def _remember_variables(
    holder: Holder, assigned: Set[str], undo: list[Callable[[], object]], visited: dict[int, Any]
) -> None:
    before = {name: holder.read(name) for name in holder.names}
    for name, value in before.items():
        # Parameters of other modules are not copied: they may be large, and forward seldom writes to them.
        if name != "_parameters" or not isinstance(holder.held, nn.Module):
            _remember([value], undo, visited)
    if not isinstance(holder, ContextVariable):
        # Other threads may change variables that the code does not assign.
        before = {name: value for name, value in before.items() if name in assigned}
    undo.append(functools.partial(_reset_variables, holder, before, assigned - _attributes_of(holder)))


def _attributes_of(holder: Holder) -> Set[str]:
    """Return the names of all plain attributes, including attributes that the code does not name yet."""
    return {name for name, value in _table(holder).items() if isinstance(value, VALUES) and not name.startswith("__")}


def _table(holder: Holder) -> dict[str, Any]:
    return dict(own_attributes(holder.held)) if isinstance(holder, Attributes) else {}


def _reset_variables(holder: Holder, before: dict[str, Any], added: Set[str]) -> None:
    """Put back the values ``before``, and remove attributes that are ``added``."""
    for name, value in before.items():
        current_value = holder.read(name)
        # Other values are set by their owners, such as the stream of a logger.
        if current_value is not value and (
            current_value is MISSING or isinstance(current_value, VALUES) or array_bytes(current_value) is not None
        ):
            holder.write(name, value)
    for name in (_attributes_of(holder) & added) - before.keys():
        holder.write(name, MISSING)


def _filled(holders: Iterable[Holder]) -> dict[Any, int]:
    """Return the functions under ``functools.lru_cache``, each with its number of misses."""
    values = [holder.read(name) for holder in holders for name in list(holder.names)]
    return {v: v.cache_info().misses for v in values if isinstance(v, functools._lru_cache_wrapper)}


# Guards on the variables that forward's code names, since a graph holds their values as constants.

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

    def leaf(value: Any) -> Any:
        held = array_bytes(value)
        return IdentityRef(value) if held is None else (type(value), held)

    return container_key(value, leaf, MAX_DEPTH)

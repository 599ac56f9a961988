"""Walk the Python state that forward can keep between calls: compare it, and put it back."""

from __future__ import annotations

import functools
import pickle
import random
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hfusion.capture.reachable_code import MISSING, Attributes, CodeSearch, ContextVariable, Holder, search_of
from hfusion.capture.registered_tensors import is_array
from hfusion.core.errors import FusionError
from hfusion.core.fingerprint import is_user_code
from hfusion.core.memory import same_values
from hfusion.core.python_values import (
    PLAIN,
    IdentityRef,
    array_bytes,
    container_key,
    items,
    own_attributes,
    parts,
    plain_key,
    walk,
)

MUTABLE_CONTAINERS = (list, dict, set, deque)
# An OrderedDict is no longer one after methods of dict have changed it.
_BASES = (OrderedDict, dict, list, set, deque)
VALUES = (*PLAIN, *MUTABLE_CONTAINERS, Tensor)
_ATOMS = (*PLAIN, Tensor, type, types.ModuleType, types.BuiltinFunctionType)
# Most of the variables that code names; they compare as the same object.
CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
# Nested levels of containers whose items are compared.
_DEPTH = 3
# Size in bytes up to which the values of a tensor outside of the model are restored.
MAX_TENSOR_BYTES = 64 * 2**20
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


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
        return IdentityRef(value), pickle.dumps(_draws(value))
    return IdentityRef(value), value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _change_back(item: Any) -> Callable[[], object] | None:
    """Return a function that restores the values of an array, or the state of a generator; None for anything else."""
    if isinstance(item, torch.Generator):
        return functools.partial(item.set_state, item.get_state())
    if isinstance(item, GENERATORS):
        return functools.partial(_set_draws, item, _draws(item))
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


def _draws(generator: Any) -> Any:
    """Return the state of a random generator; None if it has none, like `random.SystemRandom`."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.bit_generator.state


def _set_draws(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif state is not None:
        (generator.set_state if isinstance(generator, np.random.RandomState) else generator.setstate)(state)


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
        if (change := _change_back(item)) is not None:
            undo.append(change)
        elif isinstance(item, MUTABLE_CONTAINERS):
            base = next(kind for kind in _BASES if isinstance(item, kind))
            undo.append(functools.partial(_refill, base, item, _items(base, item)))
            if isinstance(held := own_attributes(item), dict):
                undo.append(functools.partial(_refill, dict, held, dict(held)))
            return [part for _, _, part in parts(item)]
        return [part for _, _, part in items(item)] if isinstance(item, tuple) else []

    walk(values, visit, visited)


def _items(base: Any, holder: Any) -> dict[Any, Any] | list[Any]:
    return dict(base.items(holder)) if base in (dict, OrderedDict) else list(base.__iter__(holder))


def _refill(base: Any, holder: Any, items: dict[Any, Any] | list[Any]) -> None:
    """Restore the ``items`` of a container by methods of ``base``, since a subclass may forbid changes."""
    if list(map(id, _flat(_items(base, holder)))) != list(map(id, _flat(items))):
        base.clear(holder)
        (base.extend if base in (list, deque) else base.update)(holder, items)


def _flat(items: dict[Any, Any] | list[Any]) -> list[Any]:
    return [*items, *items.values()] if isinstance(items, dict) else items


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

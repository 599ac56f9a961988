"""What forward can keep from one call to the next besides tensors' values: read it, and put it back."""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Packages whose own variables are no state of a model.
_FOREIGN = frozenset({"torch", "builtins", "typing", "abc", "numpy", "collections", "functools", "hfusion"})
_PLAIN = (str, bool, int, float, complex, bytes, types.NoneType, torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, dict, set, deque)
# Classes that derive from these may have rules of their own.
_MAPPINGS = (dict, OrderedDict, defaultdict)
_VALUES = (*_PLAIN, *_CONTAINERS, Tensor)
_ATOMS = (*_PLAIN, Tensor, type, types.ModuleType, types.BuiltinFunctionType)
MOST_ITEMS = 1000


@contextmanager
def restored(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Put back, at the end, the attributes of ``module`` and the variables of its classes and of the files they are in.

    Tensors come back as objects; their values are not kept. What ``functools.lru_cache`` took in meanwhile is dropped.

    Yields: a function that puts everything back at once.
    """
    undo: list[Callable[[], object]] = []
    met: dict[int, Any] = {}
    for part in module.modules():
        _remember(part, undo, met)
    holders = _holders(module)
    for holder in holders:
        _remember_variables(holder, undo, met)
    filled = _filled(holders)

    def back() -> None:
        for change in undo:
            change()
        for cache, misses in _filled(holders).items():
            if filled.get(cache) != misses:
                cache.cache_clear()

    try:
        yield back
    finally:
        back()


def variables(module: nn.Module) -> dict[str, Any]:
    """The plain variables of the classes of ``module`` and its submodules, and of their files: name to a comparable
    value."""
    return {
        f"{_name(holder)}.{name}": _comparable(value)
        for holder in _holders(module)
        for name, value in list(vars(holder).items())
        if isinstance(value, _VALUES) and not name.startswith("__")
    }


def _name(holder: Any) -> str:
    return f"{holder.__module__}.{holder.__qualname__}" if isinstance(holder, type) else str(holder.__name__)


def _holders(module: nn.Module) -> list[Any]:
    """The classes of the modules, those they derive from, and the files (Python modules) that define them."""
    found: dict[Any, None] = {}
    for part in module.modules():
        found |= dict.fromkeys(kind for kind in type(part).__mro__ if not _foreign(kind.__module__))
        values = [value for holder in (part, *type(part).__mro__) for value in vars(holder).values()]
        files = [kind.__module__ for kind in found if isinstance(kind, type)]
        files += [value.__module__ for value in values if isinstance(value, types.FunctionType)]
        found |= {sys.modules[file]: None for file in files if file in sys.modules and not _foreign(file)}
    return list(found)


def _foreign(file: str | None) -> bool:
    return file is None or file.partition(".")[0] in _FOREIGN


def _comparable(value: Any, depth: int = 3) -> Any:
    if isinstance(value, float | complex):
        return (type(value), repr(value))
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, Tensor):
        return (id(value), value._version if not value.is_inference() else 0)
    if not isinstance(value, _CONTAINERS):
        return id(value)
    if depth == 0 or len(value) > MOST_ITEMS:
        return (type(value), len(value))
    items = value.items() if isinstance(value, dict) else [(item,) for item in value]
    if isinstance(value, set):
        return frozenset(map(id, value))
    return tuple(tuple(_comparable(part, depth - 1) for part in pair) for pair in items)


def _remember(value: Any, undo: list[Callable[[], object]], met: dict[int, Any], objects: bool = True) -> None:
    """Note in ``undo`` how ``value`` and what it holds come back; ``met`` keeps what was seen, so that ids last.

    ``objects``: also inside of objects and closures, not of lists and the like only.
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        # What stands in for a submodule notes its calls, which are no state of the model.
        if id(item) in met or isinstance(item, _ATOMS) or hasattr(item, "hfusion_opaque"):
            continue
        met[id(item)] = item
        if isinstance(item, torch.Generator):
            undo.append(functools.partial(item.set_state, item.get_state()))
        elif type(item) in _MAPPINGS:
            undo.append(functools.partial(_refill_dict, item, dict(item)))
            waiting += item.values()
        elif type(item) in (list, set, deque):
            undo.append(functools.partial(_refill, item, list(item)))
            waiting += item
        elif isinstance(item, tuple):
            waiting += tuple.__iter__(item)
        elif isinstance(item, types.FunctionType) and objects:
            for cell in _filled_cells(item):
                undo.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
                waiting.append(cell.cell_contents)
        elif hasattr(item, "__dict__") and objects:
            waiting.append(vars(item))


def _filled_cells(function: types.FunctionType) -> list[Any]:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:
            continue
        cells.append(cell)
    return cells


def _refill_dict(holder: dict[Any, Any], items: dict[Any, Any]) -> None:
    if len(holder) != len(items) or any(holder.get(name, holder) is not value for name, value in items.items()):
        holder.clear()
        holder.update(items)


def _refill(holder: Any, items: list[Any]) -> None:
    if len(holder) != len(items) or any(a is not b for a, b in zip(holder, items, strict=True)):
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(items)


def _remember_variables(holder: Any, undo: list[Callable[[], object]], met: dict[int, Any]) -> None:
    known = dict(vars(holder))
    for value in known.values():
        _remember(value, undo, met, objects=False)
    undo.append(functools.partial(_reset_variables, holder, known))


def _reset_variables(holder: Any, known: dict[str, Any]) -> None:
    now = dict(vars(holder))
    for name in [name for name, value in now.items() if isinstance(value, _VALUES) and not name.startswith("__")]:
        if name not in known:
            delattr(holder, name)
        elif known[name] is not now[name]:
            setattr(holder, name, known[name])


def _filled(holders: list[Any]) -> dict[Any, int]:
    """The functions under ``functools.lru_cache``, with how often they were filled: traced, they keep no tensors."""
    values = [value for holder in holders for value in list(vars(holder).values())]
    return {v: v.cache_info().misses for v in values if isinstance(v, functools._lru_cache_wrapper)}

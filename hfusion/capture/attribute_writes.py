"""Attributes that the code of modules may assign: of the module itself, or of other objects.

A recorded run shows only the assignments that it makes, and not those of an equal value.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable
from typing import TypeAlias

from torch import nn

from hfusion.capture.attribute_bytecode import writes
from hfusion.core.fingerprint import functions_behind, is_user_code, names_in

# Classes of modules, and functions that are attributes of modules.
_Sources: TypeAlias = frozenset[type | types.FunctionType]


def names_written(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of attributes that forward of ``model`` may assign, and of containers whose items it may change.

    The second are all names in code that changes items of anything.
    """
    codes = [function.__code__ for function in functions_reached(model)]
    assigned = [writes(code).of_self | writes(code).of_others for code in codes]
    named = [names_in(code).attributes for code in codes if _changes_items(code)]
    return frozenset().union(*assigned), frozenset().union(*named)


def functions_reached(model: nn.Module) -> frozenset[types.FunctionType]:
    """Return the functions that forward of ``model`` may call, without those of libraries."""
    sources = _sources(model.modules())
    # Functions of single modules are not kept alive: they may hold tensors.
    search = _search_of_classes if all(isinstance(source, type) for source in sources) else _search
    return search(("forward",), sources)


def _sources(modules: Iterable[nn.Module]) -> _Sources:
    sources = set[type | types.FunctionType]()
    for module in modules:
        sources.add(type(module))
        for value in vars(module).values():
            if callable(value) and not isinstance(value, nn.Module | type):
                sources.update(functions_behind(value))
    return frozenset(sources)


def _search(methods: tuple[str, ...], sources: _Sources) -> frozenset[types.FunctionType]:
    """Return the functions in ``sources``, the ``methods`` of classes there, and all that these call by name."""
    named, reached = set(methods), set[types.FunctionType]()
    candidates = [function for source in sources for function in _functions(source)]
    waiting = [function for function in candidates if function.__name__ in named]
    waiting += [source for source in sources if isinstance(source, types.FunctionType)]
    while waiting:
        function = waiting.pop()
        if function in reached:
            continue
        reached.add(function)
        names = names_in(function.__code__)
        values = [function.__globals__[name] for name in names.variables if name in function.__globals__]
        waiting += [f for value in values for f in functions_behind(value) if is_user_code(f.__module__)]
        more = set(names.attributes) - named
        waiting += [f for f in candidates if f.__name__ in more]
        named |= more
    return frozenset(reached)


_search_of_classes = functools.lru_cache(maxsize=1024)(_search)


def _functions(source: type | types.FunctionType) -> tuple[types.FunctionType, ...]:
    """Return a function, or the functions of a class and its bases, without `__init__` and library code."""
    if isinstance(source, types.FunctionType):
        return (source,)
    return tuple(
        function
        for base in source.__mro__
        if is_user_code(base.__module__)
        for name, value in vars(base).items()
        if name != "__init__"
        for function in functions_behind(value)
    )


# Methods that change a list, dict, set or deque.
CHANGING_METHODS = frozenset(
    {"append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "clear"}
)
CHANGING_METHODS |= {"add", "discard", "update", "setdefault"}


def _changes_items(code: types.CodeType) -> bool:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return (
        not CHANGING_METHODS.isdisjoint(code.co_names)
        or any(step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for step in dis.get_instructions(code))
        or any(map(_changes_items, inner))
    )

"""Attributes that the code of modules may assign: of the module itself, or of other objects.

A recorded run shows only the assignments that it makes, and not those of an equal value.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterable
from typing import TypeAlias

from torch import nn

from hfusion.capture.attribute_bytecode import reads_of_others, writes
from hfusion.capture.method_interception import Island
from hfusion.core.fingerprint import functions_behind, is_user_code, names_in

# Classes of modules, and functions that are attributes of modules.
_Sources: TypeAlias = frozenset[type | types.FunctionType]


def written_by_call(island: Island, module: nn.Module) -> frozenset[str]:
    """Return the names of the attributes that a call of ``island``, a method of ``module``, may assign."""
    assigned = [
        writes(function.__code__) for function in _reached((island.method, "forward"), _sources(module.modules()))
    ]
    return frozenset().union(*(w.of_self | w.of_others for w in assigned))


def written_elsewhere(island: Island, module: nn.Module, outside: Iterable[nn.Module]) -> frozenset[str]:
    """Return the names of the attributes of ``module`` that code of the modules ``outside`` may assign in forward."""
    reached = _reached(("forward",), _sources(outside))
    named = {name for function in reached for name in names_in(function.__code__).attributes}
    named -= {"forward", island.method}
    called = [f for source in _sources(module.modules()) for f in _functions(source) if f.__name__ in named]
    direct = (name for function in reached for name in writes(function.__code__).of_others)
    return frozenset(direct).union(*(writes(function.__code__).of_self for function in called))


def read_elsewhere(outside: Iterable[nn.Module]) -> frozenset[str]:
    """Return the names of the attributes that code of modules ``outside`` may read of objects other than ``self``."""
    reached = _reached(("forward",), _sources(outside))
    return frozenset().union(*(reads_of_others(function.__code__) for function in reached))


def names_named(modules: Iterable[nn.Module]) -> frozenset[str]:
    """Return the names of the attributes in all code that the forwards of ``modules`` may call."""
    reached = _reached(("forward",), _sources(modules))
    return frozenset(name for function in reached for name in names_in(function.__code__).attributes)


def containers_changed(island: Island, module: nn.Module) -> frozenset[str]:
    """Return the names of the attributes that may hold a list, dict or set that a call of ``island`` changes."""
    reached = _reached((island.method, "forward"), _sources(module.modules()))
    codes = [function.__code__ for function in reached if _changes_items(function.__code__)]
    return frozenset(name for code in codes for name in names_in(code).attributes)


def functions_reached(model: nn.Module) -> frozenset[types.FunctionType]:
    """Return the functions that forward of ``model`` may call, without those of libraries."""
    return _reached(("forward",), _sources(model.modules()))


def functions_called(function: Callable[..., object]) -> frozenset[types.FunctionType]:
    """Return the functions behind ``function`` and all functions that these may call, without those of libraries."""
    return _search((), frozenset(functions_behind(function)))


def names_in_call(island: Island, module: nn.Module) -> frozenset[str]:
    """Return the names of variables and attributes in all code that a call of ``island``, of ``module``, may run."""
    named = [
        names_in(function.__code__) for function in _reached((island.method, "forward"), _sources(module.modules()))
    ]
    return frozenset().union(*((*names.variables, *names.attributes) for names in named))


def _sources(modules: Iterable[nn.Module]) -> _Sources:
    sources = set[type | types.FunctionType]()
    for module in modules:
        sources.add(type(module))
        for value in vars(module).values():
            if callable(value) and not isinstance(value, nn.Module | type):
                sources.update(functions_behind(value))
    return frozenset(sources)


def _reached(methods: tuple[str, ...], sources: _Sources) -> frozenset[types.FunctionType]:
    """Return the functions in ``sources``, the ``methods`` of classes there, and all that these call by name."""
    # Functions of single modules are not kept alive: they may hold tensors.
    search = _search_of_classes if all(isinstance(source, type) for source in sources) else _search
    return search(methods, sources)


def _search(methods: tuple[str, ...], sources: _Sources) -> frozenset[types.FunctionType]:
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

"""Find the attributes that a function, and those that it may call, assign and read, from their bytecode.

A recorded run shows only the assignments that it makes, and not those of an equal value.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from hfusion.core.fingerprint import functions_behind, is_user_code, names_in


@dataclass(frozen=True)
class AttributeWrites:
    """The names of the attributes that a function assigns on its first argument, and on other objects."""

    of_self: frozenset[str]
    of_others: frozenset[str]


_STORES = frozenset(
    code
    for name, code in dis.opmap.items()
    if name.startswith(("STORE_", "DELETE_")) and name.endswith(("_ATTR", "_GLOBAL", "_NAME", "_DEREF"))
)


@functools.lru_cache(maxsize=16)
def _storing(code: types.CodeType) -> list[dis.Instruction]:
    """Return the instructions of ``code``; none if it assigns no attribute or outer variable, as most code."""
    return [] if _STORES.isdisjoint(code.co_code[::2]) else list(dis.get_instructions(code))


@functools.lru_cache(maxsize=4096)
def writes(code: types.CodeType) -> AttributeWrites:
    """Return the attributes that ``code`` and its nested functions assign or delete. Tried on Python 3.11 to 3.13."""
    of_self, of_others = set[str](), set[str]()
    steps = _storing(code)
    selves = _selves(code)
    for k, step in enumerate(steps):
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            (of_self if holder_variable(steps, k) in selves else of_others).add(step.argval)
    if "setattr" in code.co_names:
        names = {const for const in code.co_consts if isinstance(const, str) and const.isidentifier()}
        of_self |= names
        of_others |= names
    for inner in (writes(const) for const in code.co_consts if isinstance(const, types.CodeType)):
        of_self |= inner.of_self
        of_others |= inner.of_others
    return AttributeWrites(frozenset(of_self), frozenset(of_others))


def _selves(code: types.CodeType) -> set[str]:
    """Return the variables that may hold ``self``: the first argument, and the free variables of a nested function."""
    return {*code.co_varnames[: min(code.co_argcount, 1)], *code.co_freevars}


def holder_variable(steps: list[dis.Instruction], k: int) -> str | None:
    """Return the variable whose attribute the instruction at ``k`` accesses; None if the object is no variable."""
    previous = k - 1
    if steps[previous].opname == "SWAP":
        # ``self.n += 1`` copies the object first, reads the attribute, and assigns it at the end.
        previous = next(
            (
                j - 1
                for j in range(k - 1, 0, -1)
                if steps[j].opname == "COPY" and j + 1 < k and steps[j + 1].argval == steps[k].argval
            ),
            -1,
        )
    if previous < 0 or "LOAD_" not in steps[previous].opname or "ATTR" in steps[previous].opname:
        return None
    name = steps[previous].argval
    return name[-1] if isinstance(name, tuple) else name if isinstance(name, str) else None


@functools.lru_cache(maxsize=4096)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Return the attributes that ``code`` and its nested functions name, or may read by getattr."""
    names = names_in(code)
    return frozenset((*names.attributes, *names.texts))


# Names by which code may assign variables whose names are strings.
_ASSIGNING = frozenset({"setattr", "delattr", "__setattr__", "__dict__", "vars", "globals", "exec", "update"})


@functools.lru_cache(maxsize=4096)
def assigned_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of variables and attributes that ``code`` and its nested functions may assign."""
    attributes = writes(code)
    names = {
        step.argval
        for step in _storing(code)
        if step.opname.startswith(("STORE_", "DELETE_")) and step.opname.endswith(("_GLOBAL", "_NAME", "_DEREF"))
    }
    names |= attributes.of_others
    # A constructor called in forward assigns to a new object, not to one that exists.
    if code.co_name not in ("__init__", "__post_init__"):
        names |= attributes.of_self
    if not _ASSIGNING.isdisjoint(code.co_names):
        names |= {const for const in code.co_consts if isinstance(const, str)}
    return frozenset(names).union(
        *(assigned_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    )


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

"""Find the buffers of a base that its code may write to, such as running averages: each member gets its own."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from functools import lru_cache

from torch import nn

from hfusion.capture.attribute_writes import functions_reached
from hfusion.core.fingerprint import functions_behind, names_in

# Code that uses these may write to any buffer.
_OF_ANY = frozenset({"buffers", "named_buffers", "_buffers", "state_dict"})


def may_be_written(base: nn.Module) -> frozenset[str]:
    """Return the keys of the buffers that forward of ``base`` may write to, judged by its code.

    A function may write to what it names, by attribute or in a string, if it or a function that it calls writes in
    place, or assigns attributes. So a buffer that is only read counts where the same function writes to another.
    """
    functions = {*functions_reached(base), *_functions_of_torch(base)}
    named = {name for function in functions for name in _written_names(function)}
    buffers = dict(base.named_buffers(remove_duplicate=False))
    return frozenset(buffers if named & _OF_ANY else (key for key in buffers if key.rpartition(".")[2] in named))


def _functions_of_torch(base: nn.Module) -> Iterator[types.FunctionType]:
    """Yield the methods of torch's own modules in ``base``, such as norms, except methods like ``__init__``."""
    kinds = {kind for module in base.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    for kind in kinds - {nn.Module}:
        if kind.__module__.partition(".")[0] == "torch":
            for name, value in vars(kind).items():
                yield from functions_behind(value) if not name.startswith("__") else ()


@lru_cache(maxsize=4096)
def _written_names(function: types.FunctionType) -> frozenset[str]:
    code = function.__code__
    assigned = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_ATTR", "DELETE_ATTR")}
    if not assigned and not any(_writes_in_place(candidate.__code__) for candidate in (function, *_called(function))):
        return frozenset()
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}
    return frozenset(assigned | texts | set(names_in(code).attributes))


def _called(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """Yield the global functions, except torch's, that ``function`` may call directly or indirectly."""
    visited, waiting = {function}, [function]
    while waiting:
        caller = waiting.pop()
        for name in names_in(caller.__code__).variables:
            value = caller.__globals__.get(name)
            if isinstance(value, types.FunctionType) and value not in visited and not _is_of_torch(value):
                visited.add(value)
                waiting.append(value)
                yield value


def _is_of_torch(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"


def _writes_in_place(code: types.CodeType) -> bool:
    """Return whether ``code`` calls a method like ``add_``, assigns an item, or operates in place, as ``+=`` does."""
    for step in dis.get_instructions(code):
        name = step.argval if isinstance(step.argval, str) else ""
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and name.endswith("_") and not name.endswith("__"):
            return True
        if step.opname in ("STORE_SUBSCR", "STORE_SLICE"):
            return True
        if step.opname == "BINARY_OP" and step.argrepr.endswith("="):
            return True
    return any(_writes_in_place(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))

"""Objects that a user's functions reach, to find whether they could change objects that workers have copies of."""

from __future__ import annotations

import builtins
import dis
import gc
import logging
import sysconfig
from collections.abc import Hashable, Iterable, Iterator, Sequence
from enum import Enum
from multiprocessing import current_process
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from hfusion.cluster.serialization import packed_bytes
from hfusion.core.errors import PlanError
from hfusion.core.text import readable
from hfusion.device.machine import Machine

# More objects than this are not looked through.
MAX_OBJECTS = 500_000

_CLOSED = (ModuleType, type, str, bytes, int, float, complex, Enum, CodeType, logging.Logger)
_IMMUTABLE = (*_CLOSED, FunctionType, BuiltinFunctionType, MethodType, tuple, frozenset)
_NAMED = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL")
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class TooManyObjects(Exception):
    """More objects are reachable than the search visits."""


def shared_object(local_objects: Iterable[object], sent: Iterable[object]) -> str | None:
    """Describe an object that ``local_objects`` can change and ``sent`` reaches; return None if there is none.

    Follows attributes, closures, defaults, and the global variables that functions name. Functions of installed
    packages are assumed to share no state. Raises TooManyObjects.
    """
    changeable = dict(_reached(local_objects, writes=True))
    return next((text for key, text in _reached(sent, writes=False) if key in changeable), None) if changeable else None


def copy_obstacle(
    local_functions: Sequence[object], sent: Sequence[object], parcels: Iterable[tuple[str, object]], machine: Machine
) -> str:
    """Return why worker processes cannot train with copies of ``sent``; empty if they can.

    Args:
        local_functions: functions that are called in this process, such as callbacks.
        sent: the user's objects that training reads.
        parcels: objects to pickle, one per array, each with its name for error messages.
    """
    if current_process().daemon:
        return "this is a daemonic process, which may start none"
    try:
        if local_functions and (text := shared_object(local_functions, sent)):
            return f"callbacks reach {text} that the training uses, and would change a copy of it"
        largest = max(packed_bytes(name, value) for name, value in parcels)
    except TooManyObjects as error:
        return f"callbacks and what the training uses hold {error}"
    except (PlanError, ImportError) as error:
        return str(error)
    if largest * len(machine.devices) <= machine.host:
        return ""
    copies = f"{len(machine.devices)} copies of {readable(largest)}, one for each process,"
    return f"{copies} exceed the host's {readable(machine.host)}"


def _reached(roots: Iterable[object], *, writes: bool) -> Iterator[tuple[Hashable, str]]:
    """Yield a key and a description of each mutable object, and of each global written (``writes``) or named."""
    visited_ids: set[int] = set()
    # Visited objects are kept alive, so that no id is reused.
    visited: list[object] = []
    waiting = list(roots)
    while waiting:
        if len(visited) > MAX_OBJECTS:
            raise TooManyObjects(f"more than {MAX_OBJECTS:,} objects")
        value = waiting.pop()
        if id(value) in visited_ids or value is None or isinstance(value, _CLOSED):
            continue
        visited_ids.add(id(value))
        visited.append(value)
        if not isinstance(value, _IMMUTABLE):
            yield id(value), f"an object of class {type(value).__name__}"
        if isinstance(value, FunctionType):
            reads, written = _globals_of(value)
            for name in written if writes else reads:
                yield (id(value.__globals__), name), f"the variable {name}"
            waiting += [value.__globals__[name] for name in reads if name in value.__globals__]
            waiting += value.__closure__ or ()
            if not _installed(value):
                waiting += [value.__defaults__, value.__kwdefaults__, value.__dict__]
        else:
            waiting += gc.get_referents(value)


def _installed(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_INSTALLED)


def _globals_of(function: FunctionType) -> tuple[set[str], set[str]]:
    """Return the global variables that a function names, and those it writes; none for installed packages."""
    if _installed(function):
        return set(), set()
    reads: set[str] = set()
    written: set[str] = set()
    waiting: list[Any] = [function.__code__]
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname in _NAMED:
                reads.add(instruction.argval)
                if not instruction.opname.startswith("LOAD"):
                    written.add(instruction.argval)
    return {name for name in reads if not hasattr(builtins, name)}, written

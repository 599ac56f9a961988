"""Search the code that forward may run, for the variables it names: of files, classes, objects, functions, closures.

It finds the names that code assigns as well, since a recorded run shows only the assignments that it makes.
"""

from __future__ import annotations

import builtins
import contextvars
import dis
import functools
import itertools
import logging
import threading
import types
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from hfusion.capture.registered_tensors import is_array
from hfusion.core.fingerprint import (
    OPERATORS,
    functions_behind,
    imported_modules,
    is_installed_package,
    is_user_code,
    names_in,
)
from hfusion.core.membership import marks
from hfusion.core.python_values import (
    CONTAINERS,
    SCALARS,
    IdentityRef,
    default_arguments,
    items,
    own_attributes,
    package_of,
    read_attribute,
    safe_repr,
    size,
    slots,
)

# Largest number of nested levels of containers and objects that are searched.
MAX_DEPTH = 4
# Largest number of items of a container whose attributes are searched.
_MAX_OBJECTS = 100
# Number of functions from which on a search leaves out what packages call; most such functions never run in forward.
_MAX_FUNCTIONS = 200
_UNREAD = (logging.Logger, types.ModuleType)
# The attributes of every module, and those of them on which the results of a call depend.
_OF_MODULES = frozenset(vars(nn.Module()))
_MODULE_STATE = ("training", "_forward_hooks", "_forward_pre_hooks")
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
# Locks and queues, and what other threads do with them, are no state of a model.
_OF_THREADS = frozenset({"threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio"})


_shared = threading.local()


@contextmanager
def searched_once() -> Iterator[None]:
    """Context manager: within it, models with the same code share one search. Searches are short-lived otherwise."""
    outer = getattr(_shared, "by_code", None)
    _shared.by_code = {} if outer is None else outer
    try:
        yield
    finally:
        _shared.by_code = outer


def search_of(models: Sequence[nn.Module]) -> CodeSearch:
    """Return the search of the code of ``models``; see `searched_once`."""
    kept: dict[Any, CodeSearch] | None = getattr(_shared, "by_code", None)
    parts = [(path, part) for model in models for path, part in model.named_modules()]
    code = tuple([(path, type(part), *map(id, _instance_functions(part))) for path, part in parts])
    # A module outside of one model may be a part of another one with the same code. A key keeps models and so ids.
    own = code, tuple(map(IdentityRef, models))
    if kept is not None and (found := kept.get(code) or kept.get(own)) is not None:
        return found
    search = CodeSearch(models)
    if kept is not None:
        kept[own if search.outer_modules else code] = search
    return search


def names_of(models: Sequence[nn.Module]) -> frozenset[str]:
    """Return all names in the code that the forward of ``models`` may run, also those that it passes to getattr."""
    return search_of(models).all_names


@functools.lru_cache(maxsize=1024)
def names_in_torch(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names in the methods that a module has from classes of torch, whose code no search follows."""
    bases = [base for base in kind.__mro__ if base not in (nn.Module, object) and not is_user_code(base.__module__)]
    functions = [f for base in bases for value in vars(base).values() for f in functions_behind(value)]
    return frozenset().union(*(attribute_names(function.__code__) for function in functions))


class CodeSearch:
    """Follows the code of modules from their forward on: methods, functions of files, and the names in these.

    A name that is used anywhere counts for all objects within reach: any code may be given any of them. The search
    follows the functions that the user's files and the files of the modules' classes call. What functions of other
    installed packages call is followed only in small packages, see `_MAX_FUNCTIONS`.

    Attributes:
        holders: the holders of variables within reach, even if the code names none of their variables.
        spaces: by the id of a file's dict of globals, the dict and the names that functions use.
        assigned: the names of variables and attributes that the code may assign.
        outer_modules: whether the code refers to modules that it does not reach through ``models``.
        complete: whether all functions within reach were followed.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        parts = [part for model in models for part in model.modules()]
        self._kinds = list(dict.fromkeys(map(type, parts)))
        self._registered = set(map(id, parts))
        # Each member may hold such a function of its own; members that join must not add names.
        self._of_members = {id(function): function for part in parts for function in _instance_functions(part)}
        self._files = {kind.__module__ for kind in self._kinds}
        methods = [pair for kind in self._kinds for pair in _methods(kind)]
        self._methods = list({id(function): (name, function) for name, function in methods}.values())
        self.outer_modules, self.complete = False, True
        self.spaces: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.assigned: set[str] = set()
        self._named: set[str] = {"forward", "__call__", "__getattr__"}
        self._holders: dict[tuple[type, int], Holder] = {}
        self._titles = Counter[str]()
        self._functions: dict[type, list[tuple[str, types.FunctionType]]] = {}
        # By id of an object: the number of nested levels that were searched.
        self._looked_at: dict[int, int] = {}
        before = -1
        while before != len(self._named):
            before, self._looked_at = len(self._named), {}
            self._follow()

    @cached_property
    def all_names(self) -> frozenset[str]:
        """All names in the code, also those that it passes to getattr."""
        return frozenset(self._named).union(*(names for _, names in self.spaces.values()))

    @property
    def holders(self) -> list[Holder]:
        return list(self._holders.values())

    def _follow(self) -> None:
        """Follow all code by the names that are known so far."""
        waiting = [*self._of_members.values()]
        waiting += [method for name, method in self._methods if name in self._named or _is_operator(name, method)]
        for kind in self._kinds:
            waiting += self._class(kind)
        visited = set[int]()
        distant: list[types.FunctionType] = []  # What functions of other packages call, the nearest first.
        while waiting or distant:
            is_distant = not waiting
            function = distant.pop(0) if is_distant else waiting.pop()
            if id(function) in visited or not is_user_code(function.__module__):
                continue
            if is_distant and len(visited) >= _MAX_FUNCTIONS:
                self.complete = False
                continue
            visited.add(id(function))
            is_own = function.__module__ in self._files or not is_installed_package(function.__module__)
            (waiting if is_own else distant).extend(self._look(function))

    def _look(self, function: types.FunctionType) -> Iterator[types.FunctionType]:
        """Note the variables that a function names; yield the functions that it may call."""
        names, space = names_in(function.__code__), function.__globals__
        by_text = not _BY_TEXT.isdisjoint((*names.variables, *names.attributes))
        variables = {*names.variables, *(names.texts if by_text else ())}
        self._named |= attribute_names(function.__code__)
        self.assigned |= assigned_names(function.__code__)
        self.spaces.setdefault(id(space), (space, set()))[1].update(variables)
        for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            if name != "__class__":
                numbered = id(function) not in self._of_members
                held = self._note(ClosureVariable(f"{function.__qualname__}.", cell), name, numbered=numbered)
                yield from self._inside(name, held.read(name))
        for name, value in default_arguments(function).items():
            if not isinstance(value, SCALARS):
                self._note(DefaultArguments(f"{function.__qualname__}.", function), name)
                yield from self._inside(name, value)
        for name in sorted(set(names.variables) - space.keys() - vars(builtins).keys()):
            self._note(GlobalVariables(f"{function.__module__}.", space), name)
        yield from self._named_in(function.__module__, space, variables, set())
        for module in imported_modules(function.__code__):
            yield from self._named_in(module.__name__, vars(module), self._named, set())

    def _class(self, kind: type) -> Iterator[types.FunctionType]:
        """Note variables of a class and its bases that code names; yield the functions that code may call in them."""
        variables = _class_variables(kind)
        for base in kind.__mro__:
            if is_user_code(base.__module__):
                # A variable of a base may be assigned to a class of the user's, too.
                held = vars(base).keys() if is_installed_package(base.__module__) else variables.union(vars(base))
                for name in sorted(name for name in self._named.intersection(held) if not name.startswith("__")):
                    holder = self._note(Attributes(f"{base.__qualname__}.", base), name)
                    yield from self._inside(f"{base.__qualname__}.{name}", holder.read(name))

    def _named_in(
        self, title: str, space: dict[str, Any], variables: Set[str], visited: set[int]
    ) -> Iterator[types.FunctionType]:
        """Note the ``variables`` of a file, and those of modules among them; yield the functions among them."""
        visited.add(id(space))
        for name in sorted(variables & space.keys()):
            value = space[name]
            if isinstance(value, types.ModuleType):
                if is_user_code(value.__name__) and id(vars(value)) not in visited:
                    yield from self._named_in(value.__name__, vars(value), self._named, visited)
                continue
            self._note(GlobalVariables(f"{title}.", space), name)
            yield from self._inside(name, value)

    def _inside(self, title: str, value: Any, depth: int = MAX_DEPTH) -> Iterator[types.FunctionType]:
        """Note the attributes inside a value that code reads; yield the functions that it may call."""
        if isinstance(value, nn.Module):
            self.outer_modules = True
            yield from () if is_array(value) else self._module(title, value)
            return
        if isinstance(value, (*SCALARS, *_UNREAD)) or self._looked_at.get(id(value), 0) >= depth:
            return
        if package_of(type(value)) in _OF_THREADS and not isinstance(value, threading.local):
            return
        self._looked_at[id(value)] = depth
        if isinstance(value, Tensor):
            yield from self._attributes(title, value, marks(value).keys(), depth)
        elif isinstance(value, type):
            if is_user_code(value.__module__):
                yield from self._called(value)
                yield from self._class(value)
        elif isinstance(value, contextvars.ContextVar):
            self._note(ContextVariable("contextvars.", value), value.name)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                yield from self._inside(title, part, depth)
        elif isinstance(value, weakref.ref):
            yield from self._inside(title, value(), depth)
        elif isinstance(value, staticmethod | classmethod | types.MethodType):
            yield from functions_behind(value)
            yield from self._inside(title, getattr(value, "__self__", None), depth)
        else:
            if size(value) <= _MAX_OBJECTS:
                for index, (_, name, item) in enumerate(items(value)):
                    key = index if name is None else safe_repr(name)
                    yield from self._inside(f"{title}[{key}]", item, depth - 1)
            yield from self._object(title, value, depth)

    def _object(self, title: str, value: Any, depth: int) -> Iterator[types.FunctionType]:
        """Do the same as `_inside` for a value that may have attributes: an object, or a function."""
        if callable(value):
            yield from functions_behind(value)
        has_dict = read_attribute(value, "__dict__", None) is not None
        if isinstance(value, types.FunctionType):
            present = frozenset(vars(value))
        else:
            for method in self._called(type(value)):
                # What methods of torch and Python read of their object is within it.
                self._named |= attribute_names(method.__code__)
                yield method
            present = _attributes(value).union(_class_variables(type(value)) if has_dict else ())
            if not is_installed_package(type(value).__module__):
                yield from self._class(type(value))
        if has_dict:
            self._register_holder(Attributes(f"{title}.", value))
        yield from self._attributes(title, value, present, depth)

    def _attributes(self, title: str, value: Any, present: Set[str], depth: int) -> Iterator[types.FunctionType]:
        """Note those attributes of a value, of the names ``present``, that code reads, and what is inside of them."""
        holder = Attributes(f"{title}.", value)
        for name in sorted(name for name in self._named & present if not name.startswith("__")):
            self._note(holder, name)
            yield from self._inside(f"{title}.{name}", holder.read(name), depth - 1)

    def _module(self, title: str, module: nn.Module) -> Iterator[types.FunctionType]:
        """Note the state of a module outside of the models; yield the functions that its forward may call."""
        for path, part in module.named_modules():
            if id(part) in self._registered or id(part) in self._looked_at:
                continue
            self._looked_at[id(part)] = MAX_DEPTH
            yield from self._called(type(part))
            title_of_part = f"{title}.{path}".strip(".")
            for name in (*_MODULE_STATE, *(table for table in _MODULE_TABLES if vars(part)[table])):
                self._note(Attributes(f"{title_of_part}.", part), name)
            yield from self._attributes(title_of_part, part, _attributes(part) - _OF_MODULES, MAX_DEPTH + 1)

    def _called(self, kind: type) -> list[types.FunctionType]:
        """Return the methods of a class that code may call."""
        if kind not in self._functions:
            self._functions[kind] = [
                (name, function)
                for base in kind.__mro__
                if base is not object
                for name, value in list(vars(base).items())
                for function in functions_behind(value)
            ]
        return [
            function
            for name, function in self._functions[kind]
            if name in self._named or name in _MADE or _is_operator(name, function)
        ]

    def _note(self, holder: Holder, name: str, numbered: bool = True) -> Holder:
        registered = self._register_holder(holder, numbered)
        registered.names.add(name)
        return registered

    def _register_holder(self, holder: Holder, numbered: bool = True) -> Holder:
        """Return the registered holder of the same kind and object, or register ``holder``.

        ``numbered``: if its title is taken, add a number to it.
        """
        key = (type(holder), id(holder.held))
        if key not in self._holders:
            self._holders[key] = holder
            self._titles[holder.title] += 1
            if (count := self._titles[holder.title]) > 1 and numbered:
                holder.title = f"{holder.title[:-1]} ({count})."
        return self._holders[key]


def _instance_functions(module: nn.Module) -> list[types.FunctionType]:
    """Return the functions that a module holds in attributes of its own."""
    held = list(vars(module).values())
    return [f for value in held if callable(value) for f in functions_behind(value) if is_user_code(f.__module__)]


def _methods(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    for base in kind.__mro__:
        if is_user_code(base.__module__):
            for name, value in list(vars(base).items()):
                yield from ((name, function) for function in functions_behind(value))


def _attributes(value: Any) -> frozenset[str]:
    """Return the names of the attributes of an object itself, without those of its class."""
    return frozenset(slots(type(value))).union(own_attributes(value))


def _class_variables(kind: type) -> frozenset[str]:
    """Return the names of the variables of a class and its bases that are data."""
    return frozenset(
        name
        for base in kind.__mro__
        if is_user_code(base.__module__)
        for name, held in vars(base).items()
        if isinstance(held, (*SCALARS, *CONTAINERS)) and not name.startswith("__")
    )


def _is_operator(name: str, method: types.FunctionType) -> bool:
    """Return whether code may call a method without naming it. Those of packages are taken to read nothing else."""
    return name in OPERATORS and not is_installed_package(method.__module__)


_MADE = frozenset({"__init__", "__post_init__", "__call__", "__getattr__", "__getitem__"})

# Names by which code may read global variables whose names are strings.
_BY_TEXT = frozenset({"globals", "vars", "eval", "exec", "__dict__", "__globals__", "modules"})


# The names of attributes and variables in code, from its bytecode.

# Methods that change a list, dict, set or deque.
_CHANGING_METHODS = frozenset(
    {"append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "clear"}
)
_CHANGING_METHODS |= {"add", "discard", "update", "setdefault"}
# Names by which code may assign variables whose names are strings.
_ASSIGNING = frozenset({"setattr", "delattr", "__setattr__", "__dict__", "vars", "globals", "exec", "update"})
_ASSIGNMENTS = frozenset(
    f"{verb}_{kind}" for verb in ("STORE", "DELETE") for kind in ("ATTR", "GLOBAL", "NAME", "DEREF")
)


@functools.lru_cache(maxsize=4096)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """Return the attributes that ``code`` and its nested functions name, or may read by getattr."""
    names = names_in(code)
    return frozenset((*names.attributes, *names.texts))


@functools.lru_cache(maxsize=4096)
def assigned_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of variables and attributes that ``code`` and its nested functions may assign or delete."""
    names = set[str]()
    steps = list(dis.get_instructions(code)) if _has(code, _ASSIGNMENTS) else []
    # A constructor called in forward assigns to a new object, not to one that exists.
    new = code.co_varnames[0] if code.co_name in ("__init__", "__post_init__") and code.co_argcount else None
    for previous, step in zip([None, *steps], steps, strict=False):
        if step.opname in _ASSIGNMENTS and (new is None or _loaded(previous) != new):
            names.add(step.argval)
    if not _ASSIGNING.isdisjoint(code.co_names):
        names |= {const for const in code.co_consts if isinstance(const, str)}
    return frozenset(names).union(*map(assigned_names, _nested(code)))


def names_written(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that forward of ``model`` may assign, and those of containers whose items it may change.

    Only functions that forward may call are read: a `CodeSearch` also follows what could be called elsewhere, and of a
    large package, which assigns many names, hardly anything would be left.
    """
    codes = [function.__code__ for function in _functions_of(model, "forward")]
    return frozenset().union(*map(assigned_names, codes)), frozenset().union(*map(filled_names, codes))


def names_added(model: nn.Module, method: str) -> frozenset[str]:
    """Return the names of attributes that a method of ``model`` may add to objects, or by which it may do so.

    A counter that a rare value starts is no attribute of any object yet. Code in the files of the modules' classes and
    in the user's counts, since packages add attributes to many objects of their own.
    """
    files = {type(part).__module__ for part in model.modules()}
    own = (f for f in _functions_of(model, method) if f.__module__ in files or not is_installed_package(f.__module__))
    return frozenset().union(*(added_names(function.__code__) for function in own))


def compares_identity(model: nn.Module) -> bool:
    """Return whether forward of ``model`` may ask whether two objects are one, as in ``query is key``."""
    return any(_compares(function.__code__) for function in _functions_of(model, "forward"))


@functools.lru_cache(maxsize=4096)
def _compares(code: types.CodeType) -> bool:
    steps = itertools.pairwise(dis.get_instructions(code) if _has(code, {"IS_OP"}) else ())
    found = any(step.opname == "IS_OP" and previous.opname != "LOAD_CONST" for previous, step in steps)
    return found or any(map(_compares, _nested(code)))


def _functions_of(model: nn.Module, method: str) -> set[types.FunctionType]:
    """Return the functions that a method of ``model`` may call."""
    functions = [f for part in model.modules() for f in _instance_functions(part)]
    held = (type(value) for part in model.modules() for value in vars(part).values())
    kinds = [*map(type, model.modules()), *(kind for kind in held if not is_installed_package(kind.__module__))]
    methods = [pair for kind in dict.fromkeys(kinds) for pair in _methods(kind)]
    methods = [(name, function) for name, function in methods if name != "__init__"]
    named, reached = {"forward", method}, set[types.FunctionType]()
    waiting = functions + [function for name, function in methods if name in named]
    while waiting:
        function = waiting.pop()
        if function in reached:
            continue
        reached.add(function)
        names, space = names_in(function.__code__), function.__globals__
        values = [space[name] for name in names.variables if name in space]
        # Decorators of packages hold much that forward never calls.
        cells = () if is_installed_package(function.__module__) else function.__closure__ or ()
        values += [cell.cell_contents for cell in cells if cell != types.CellType()]
        waiting += [f for value in values for f in functions_behind(value) if is_user_code(f.__module__)]
        more = set(names.attributes) - named
        waiting += [f for name, f in methods if name in more]
        named |= more
    return reached


@functools.lru_cache(maxsize=4096)
def filled_names(code: types.CodeType) -> frozenset[str]:
    """Return the attributes that ``code`` names if it, or a function nested in it, may change items of a container."""
    return frozenset(names_in(code).attributes if _changes_items(code) else ())


# Names by which code may give modules attributes, tensors or modes.
_ADDING = frozenset({"__dict__", "__setattr__", "register_buffer", "register_parameter", "add_module"})
_ADDING |= {"register_module", "train", "eval"}
# What code assigns to tensors.
_OF_TENSORS = frozenset({"data", "grad", "requires_grad"})


@functools.lru_cache(maxsize=4096)
def added_names(code: types.CodeType) -> frozenset[str]:
    """Return the attributes that ``code`` may give to its first argument, or to what it reads from an attribute.

    Those of other local variables, such as a result that is being made, are left out.
    """
    names = set(_ADDING.intersection(code.co_names))
    if "setattr" in code.co_names:
        names |= {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()} or {"setattr"}
    steps = list(dis.get_instructions(code)) if _has(code, {"STORE_ATTR"}) else []
    first = code.co_varnames[0] if code.co_argcount and code.co_name not in ("__init__", "__post_init__") else None
    for previous, step in itertools.pairwise(steps):
        # An augmented assignment swaps the value and the object, whose attribute it has read.
        if step.opname == "STORE_ATTR" and (
            previous.opname in ("LOAD_ATTR", "SWAP") or (first is not None and _loaded(previous) == first)
        ):
            names.add(step.argval)
    return frozenset(names - _OF_TENSORS).union(*map(added_names, _nested(code)))


def _changes_items(code: types.CodeType) -> bool:
    # Operators of tensors that work in place have names that end so.
    in_place = any(name.endswith("_") and not name.startswith("_") for name in code.co_names)
    changes = not _CHANGING_METHODS.isdisjoint(code.co_names) or _has(code, {"STORE_SUBSCR", "DELETE_SUBSCR"})
    return in_place or changes or any(map(_changes_items, _nested(code)))


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    return (const for const in code.co_consts if isinstance(const, types.CodeType))


def _has(code: types.CodeType, names: Set[str]) -> bool:
    """Return whether ``code`` has an instruction of one of the ``names``."""
    return not {dis.opmap[name] for name in names}.isdisjoint(code.co_code[::2])


def _loaded(step: dis.Instruction | None) -> str | None:
    """Return the variable that an instruction loads last; None if it loads none."""
    if step is None or "LOAD_" not in step.opname or "ATTR" in step.opname:
        return None
    # Python 3.13 loads two variables by one instruction.
    name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
    return name if isinstance(name, str) else None


# Read and write variables outside of a model: of files, classes, objects, functions, closures and contexts.

MISSING = object()
"""The value of a variable that does not exist."""


@dataclass
class Holder(ABC):
    """An object that holds variables. ``names``: those that code names."""

    title: str
    held: Any
    names: set[str] = field(default_factory=set)

    @abstractmethod
    def read(self, name: str) -> Any:
        """Return the value of a variable, or `MISSING`."""

    @abstractmethod
    def write(self, name: str, value: Any) -> None:
        """Assign a variable; `MISSING` removes it."""


class ClosureVariable(Holder):
    """A variable of a closure."""

    def read(self, name: str) -> Any:
        try:
            return self.held.cell_contents
        except ValueError:
            return MISSING

    def write(self, name: str, value: Any) -> None:
        if value is MISSING:
            del self.held.cell_contents
        else:
            self.held.cell_contents = value


class ContextVariable(Holder):
    """A `contextvars.ContextVar`."""

    def read(self, name: str) -> Any:
        return self.held.get(MISSING)

    def write(self, name: str, value: Any) -> None:
        # A variable of a context cannot be removed again.
        if value is not MISSING:
            self.held.set(value)


class DefaultArguments(Holder):
    """The default arguments of a function. They are never replaced, but may change in place."""

    def read(self, name: str) -> Any:
        return default_arguments(self.held).get(name, MISSING)

    def write(self, name: str, value: Any) -> None:
        pass


class GlobalVariables(Holder):
    """The global variables of a file."""

    def read(self, name: str) -> Any:
        return self.held.get(name, MISSING)

    def write(self, name: str, value: Any) -> None:
        if value is MISSING:
            del self.held[name]
        else:
            self.held[name] = value


class Attributes(Holder):
    """The attributes of a class, a function, or another object."""

    def read(self, name: str) -> Any:
        if not isinstance(self.held, type) and name in slots(type(self.held)):
            return read_attribute(self.held, name, MISSING)
        return own_attributes(self.held).get(name, MISSING)

    def write(self, name: str, value: Any) -> None:
        # A class of the user's may define __setattr__, which must not run here.
        bypass = is_user_code(type(self.held).__module__) and not isinstance(self.held, type)
        put, remove = (object.__setattr__, object.__delattr__) if bypass else (setattr, delattr)
        if value is MISSING:
            remove(self.held, name)
        else:
            put(self.held, name, value)

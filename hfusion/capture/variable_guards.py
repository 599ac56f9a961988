"""The variables that forward's code names, of files, classes, objects and closures: a graph has their values in it."""

from __future__ import annotations

import logging
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from hfusion.capture.python_reads import STRIDE_QUESTIONS
from hfusion.capture.python_state import functions_behind, slots
from hfusion.core.fingerprint import Same, imported_modules, is_user_code, names_in
from hfusion.core.torch_settings import RANDOM_STATE, asked_settings
from hfusion.device.backend import AUTOCAST_QUESTIONS

_PLAIN = (str, bool, int, float, complex, bytes, types.NoneType)
_CONTAINERS = (list, tuple, dict, set, frozenset)
# Items of a container, and levels of containers and objects in one another, that are looked at.
MAX_ITEMS = 100
MAX_DEPTH = 4
_MISSING = object()

Read: TypeAlias = Callable[[Any], Iterable[Any]]


@dataclass
class _Holder:
    """Something whose variables are named: ``names`` to the paths of the modules whose code does."""

    title: str
    held: Any
    names: dict[str, set[str]] = field(default_factory=dict)

    def read(self, name: str) -> Any:
        if isinstance(self.held, types.CellType):
            return _cell(self.held)
        if isinstance(self.held, type):
            return getattr(self.held, name, _MISSING)
        if not isinstance(self.held, dict) and name in slots(type(self.held)):
            return getattr(self.held, name, _MISSING)
        return (self.held if isinstance(self.held, dict) else vars(self.held)).get(name, _MISSING)


@dataclass(frozen=True)
class Questions:
    """The properties of torch and tensors besides values that code of models may read, by the names in it.

    Attributes:
        names: all names in the code, also those that it passes to getattr.
        autocast: whether it may read if autocast is on.
        settings: the functions that read the settings of torch that it may use.
        gradients: whether it may read which tensors need a gradient.
        strides: whether it may read strides.
        random_state: whether it may read the state of random numbers.
    """

    names: frozenset[str]
    autocast: bool
    settings: tuple[Callable[[], Any], ...]
    gradients: bool
    strides: bool
    random_state: bool

    @staticmethod
    def of(names: frozenset[str]) -> Questions:
        return Questions(
            names,
            autocast=not names.isdisjoint(AUTOCAST_QUESTIONS),
            settings=asked_settings(names),
            gradients="requires_grad" in names,
            strides=not names.isdisjoint(STRIDE_QUESTIONS),
            random_state=not names.isdisjoint(RANDOM_STATE),
        )


class Variables:
    """The variables that the code of ``models`` names, with the values they had at the last check.

    ``without`` are left out, by name. ``questions``: the other properties that the code may read.
    """

    def __init__(self, models: Sequence[nn.Module], without: frozenset[str] = frozenset()) -> None:
        self._groups: list[tuple[Read, Any, tuple[Any, ...]]] = []
        self.values: dict[str, Any] = {}
        self.readers: dict[str, frozenset[str]] = {}
        search = _CodeSearch(models)
        for holder in search.holders():
            self._add(holder, without)
        self.questions = Questions.of(search.all_names)

    def same(self) -> bool:
        """Return whether all are the very objects that they were."""
        try:
            for read, held, values in self._groups:
                if not all(map(operator.is_, read(held), values)):
                    return False
        except (KeyError, AttributeError, ValueError, RuntimeError):
            return False
        return True

    def _add(self, holder: _Holder, without: frozenset[str]) -> None:
        names = [name for name in sorted(holder.names) if f"{holder.title}{name}" not in without]
        values = [holder.read(name) for name in names]
        if names and not isinstance(holder.held, types.CellType):
            self._groups.append((_reader(holder.held, names), _table(holder.held), (*values, values[-1])))
        elif names:
            self._groups.append((lambda cell: (_cell(cell),), holder.held, (values[0],)))
        for name, value in zip(names, values, strict=True):
            title = f"{holder.title}{name}"
            self.values[title] = content(value)
            self.readers[title] = frozenset(holder.names[name])
            self._groups += _items(value)


def names_of(models: Sequence[nn.Module]) -> frozenset[str]:
    """Return all names in the code that the forward of ``models`` may run, also those that it passes to getattr."""
    search = _CodeSearch(models)
    search.holders()
    return search.all_names


def _reader(held: Any, names: list[str]) -> Read:
    # With one name more, as of a single one there would be no tuple.
    return (operator.itemgetter if isinstance(_table(held), dict) else operator.attrgetter)(*names, names[-1])


def _table(held: Any) -> Any:
    return held if isinstance(held, type | dict) or slots(type(held)) else vars(held)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _items(value: Any, depth: int = MAX_DEPTH) -> Iterator[tuple[Read, Any, tuple[Any, ...]]]:
    """Yield the items to compare of containers of plain values, which may be changed in place."""
    if isinstance(value, list | dict) and _is_plain(value):
        yield _flat, value, tuple(_flat(value))
    if isinstance(value, list | dict | tuple) and depth and _is_plain(value):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _items(item, depth - 1)


def _flat(value: Any) -> Iterator[Any]:
    """Keys and values, or items, and something else where there are more or fewer."""
    yield len(value) if len(value) <= MAX_ITEMS else None
    yield from value
    if isinstance(value, dict):
        yield from value.values()


def _is_plain(value: Any, depth: int = MAX_DEPTH) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if not isinstance(value, _CONTAINERS) or depth == 0 or len(value) > MAX_ITEMS:
        return False
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(_is_plain(item, depth - 1) for item in items)


def content(value: Any) -> Any:
    """Return a hashable form of a value: plain values by value, others by identity."""
    if not _is_plain(value):
        return Same(value)
    if isinstance(value, dict):
        return (type(value), tuple((content(k), content(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return (type(value), tuple(map(content, value)))
    if isinstance(value, set | frozenset):
        return (type(value), frozenset(map(content, value)))
    # 0.0 equals -0.0, and a NaN nothing.
    return (type(value), repr(value) if isinstance(value, float | complex) else value)


class _CodeSearch:
    """Follows the code of modules from their forward on: methods, functions of files, and the names in these."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._parts: dict[type, set[str]] = {}
        self._own: dict[type, list[types.FunctionType]] = {}
        for model in models:
            for path, part in model.named_modules():
                self._parts.setdefault(type(part), set()).add(path)
                functions = [
                    f for value in list(vars(part).values()) if callable(value) for f in functions_behind(value)
                ]
                self._own.setdefault(type(part), []).extend(functions)
        self.named: set[str] = {"forward", "__call__", "__getattr__"}
        self.variables: set[str] = set()
        self._holders: dict[int, _Holder] = {}

    @property
    def all_names(self) -> frozenset[str]:
        return frozenset(self.named | self.variables)

    def holders(self) -> list[_Holder]:
        # Methods are called from any module, so that what is named anywhere counts for all.
        before = -1
        while before != len(self.named):
            before = len(self.named)
            for kind, paths in self._parts.items():
                self._follow(kind, paths)
        return [holder for holder in self._holders.values() if holder.names]

    def _follow(self, kind: type, paths: set[str]) -> None:
        visited: set[int] = set()
        waiting = [*self._own[kind], *self._methods(kind)]
        while waiting:
            function = waiting.pop()
            if id(function) in visited or not is_user_code(function.__module__):
                continue
            visited.add(id(function))
            names, variables = _attributes_named(function), _variables_named(function)
            self.named |= names
            self.variables |= variables
            for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
                if name != "__class__":
                    self._note(f"{function.__qualname__}: ", cell, name, paths)
                    waiting += self._inside(name, _cell(cell), names, paths)
            waiting += self._named_in(function.__module__, function.__globals__, variables, names, paths, set())
            for module in imported_modules(function.__code__):
                waiting += self._named_in(module.__name__, vars(module), names, names, paths, set())
        for base in kind.__mro__:
            if is_user_code(base.__module__):
                self._class(base, self.named, paths)

    def _methods(self, kind: type) -> list[types.FunctionType]:
        return [
            function
            for base in kind.__mro__
            if is_user_code(base.__module__)
            for name, value in list(vars(base).items())
            if name in self.named
            for function in functions_behind(value)
        ]

    def _class(self, kind: type, names: set[str], paths: set[str]) -> None:
        for name, value in list(vars(kind).items()):
            # Bound class methods are created on each access, so `is` cannot compare them.
            if name in names and not isinstance(value, classmethod) and not name.startswith("__"):
                self._note(f"{kind.__qualname__}.", kind, name, paths)

    def _named_in(
        self,
        title: str,
        space: dict[str, Any],
        variables: set[str],
        names: set[str],
        paths: set[str],
        visited: set[int],
    ) -> Iterator[types.FunctionType]:
        """Note the ``variables`` of a file, and the attributes ``names`` of these; yield the functions among them."""
        visited.add(id(space))
        for name in variables & space.keys():
            value = space[name]
            if isinstance(value, types.ModuleType):
                if is_user_code(value.__name__) and id(vars(value)) not in visited:
                    yield from self._named_in(value.__name__, vars(value), names, names, paths, visited)
                continue
            self._note(f"{title}.", space, name, paths)
            yield from self._inside(name, value, names, paths)

    def _inside(
        self, title: str, value: Any, names: set[str], paths: set[str], depth: int = MAX_DEPTH
    ) -> Iterator[types.FunctionType]:
        if isinstance(value, (*_PLAIN, *_UNREAD)) or depth == 0:
            return
        if isinstance(value, type):
            if is_user_code(value.__module__):
                self._class(value, names, paths)
                yield from _called(value, names)
        elif isinstance(value, types.FunctionType | types.MethodType | staticmethod | classmethod):
            yield from functions_behind(value)
        elif is_user_code(type(value).__module__) and _attributes(value):
            yield from _called(type(value), names)
            more = names.union(*(_attributes_named(function) for function in _called(type(value), names)))
            for name in more & _attributes(value):
                self._note(f"{title}.", value, name, paths)
                yield from self._inside(f"{title}.{name}", _Holder("", value).read(name), more, paths, depth - 1)

    def _note(self, title: str, held: Any, name: str, paths: set[str]) -> None:
        holder = self._holders.setdefault(id(held), _Holder(title, held))
        holder.names.setdefault(name, set()).update(paths)


def _attributes(value: Any) -> frozenset[str]:
    """The names that an object has, itself and not by its class."""
    attributes = getattr(value, "__dict__", None)
    return slots(type(value)).union(attributes if isinstance(attributes, dict) else ())


_UNREAD = (Tensor, nn.Module, logging.Logger, types.ModuleType, *_CONTAINERS)
_MADE = frozenset({"__init__", "__post_init__", "__call__", "__getattr__", "__getitem__"})


def _called(kind: type, names: set[str]) -> list[types.FunctionType]:
    """The methods of a class that code with these names may call."""
    return [
        function
        for base in kind.__mro__
        if is_user_code(base.__module__)
        for name, value in list(vars(base).items())
        if name in names or name in _MADE
        for function in functions_behind(value)
    ]


# What reads global variables by a text.
_BY_TEXT = frozenset({"globals", "vars", "eval", "exec", "__dict__", "__globals__", "modules"})


def _attributes_named(function: types.FunctionType) -> set[str]:
    """Return the attributes in its code, and those that it reads by getattr."""
    names = names_in(function.__code__)
    return {*names.attributes, *names.texts}


def _variables_named(function: types.FunctionType) -> set[str]:
    """The global variables in its code, and those that it may ask for by a text."""
    names = names_in(function.__code__)
    by_text = not _BY_TEXT.isdisjoint((*names.variables, *names.attributes))
    return {*names.variables, *(names.texts if by_text else ())}


def within(readers: Mapping[str, frozenset[str]], name: str, places: Sequence[str]) -> bool:
    """Return whether a variable is read only by modules at or below ``places``."""
    return all(any(not at or path == at or path.startswith(f"{at}.") for at in places) for path in readers[name])

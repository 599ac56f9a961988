"""Walk Python values: the items, attributes and closures that a value refers to, and hashable keys of what they hold.

No method of a user's class is called to look into its objects: it may raise anything, or change something. Containers
are read by the methods of Python's own types, objects by their ``__dict__`` and slots.

All questions about Python state walk by this file. `hfusion.capture.attribute_fingerprint` compares models by value,
`hfusion.core.fingerprint` reads the state of functions, and `hfusion.capture.python_state` guards variables, finds
what a call changed, and puts it back.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

SCALARS = (str, bool, int, float, complex, bytes, types.NoneType)
PLAIN = (*SCALARS, torch.dtype, torch.device, torch.Size)
_ABSENT = object()
# Their values are keys as they are.
_EXACT = frozenset({str, bool, int, bytes, types.NoneType})
MAPPINGS = (dict, types.MappingProxyType)
CONTAINERS = (*MAPPINGS, list, tuple, set, frozenset, deque)
# An OrderedDict keeps an order of its own.
_BUILTIN = (OrderedDict, dict, list, tuple, set, frozenset, deque)
# By type, how to read a value of a subclass, which may compare and print in its own way. As text, NaN equals itself.
_EXACT_VALUES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (float, float.__repr__),
    (complex, complex.__repr__),
    (int, int.__int__),
    (str, str.__str__),
    (bytes, bytes.__bytes__),
)
# Size in bytes up to which arrays are compared by value.
_MAX_BYTES = 65536
# Largest number of items of a container whose items are compared.
MAX_ITEMS = 10_000
# Attributes of classes written in C, by which their objects differ, but which cannot be assigned.
_C_ATTRIBUTES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (functools.partial, ("func", "args", "keywords")),
    (deque, ("maxlen",)),
)


class Link(enum.Enum):
    """The kinds of references from a value to its parts."""

    KEY = "an item of a mapping"
    INDEX = "an item of a list, tuple or deque"
    ELEMENT = "an element of a set"
    ATTRIBUTE = "an attribute, in a slot or in the object's dict"
    CELL = "a variable of a function's closure"
    DEFAULT = "a default argument of a function"


# A link, its key, index or name (None in a set), and the value. A plain tuple, since steps walk what losses read, too.
Part: TypeAlias = tuple[Link, Any, Any]


def parts(value: Any) -> list[Part]:
    """Return the values that ``value`` refers to: the `items` of a container, and the `attributes`."""
    return items(value) + attributes(value)


def items(value: Any) -> list[Part]:
    """Return the items of a mapping, list, tuple, deque or set; none for other values."""
    base = builtin_type(value)
    if base in (list, tuple, deque):
        return [(Link.INDEX, index, item) for index, item in enumerate(base.__iter__(value))]
    if base in (set, frozenset):
        return [(Link.ELEMENT, None, item) for item in list(base.__iter__(value))]
    if base is None and not is_python_mapping(value):
        return []
    try:
        # As a list first: another thread may change the dict.
        return [(Link.KEY, key, item) for key, item in list((base or type(value)).items(value))]
    except Exception:
        # A proxy, or a ChainMap, calls the methods of what it stands for.
        return []


def builtin_type(value: Any) -> Any:
    """Return the type of Python whose methods read ``value``; None if it is no container, or of a user's own kind."""
    # One test for the many values that are none.
    return next((kind for kind in _BUILTIN if isinstance(value, kind)), None) if isinstance(value, _BUILTIN) else None


def is_python_mapping(value: Any) -> bool:
    """Return whether ``value`` is a mapping of a class of Python's library."""
    return isinstance(value, Mapping) and package_of(type(value)) in sys.stdlib_module_names


def package_of(kind: type) -> str:
    """Return the name of the package of a class; empty if its ``__module__`` is no text, as in classes of proxies."""
    module = kind.__module__
    return module.partition(".")[0] if isinstance(module, str) else ""


def own_attributes(value: Any) -> Mapping[str, Any]:
    """Return the ``__dict__`` of an object; empty if it has none, or its class hides it."""
    held = read_attribute(value, "__dict__", None)
    return held if isinstance(held, MAPPINGS) else {}


def read_attribute(value: Any, name: str, default: Any) -> Any:
    """Return an attribute of an object, such as a slot, without methods of its class that would find others."""
    try:
        return object.__getattribute__(value, name)
    except Exception:
        return default


def attributes(value: Any, without: Container[str] = ()) -> list[Part]:
    """Return the attributes of an object; of a function, also its closure and default arguments.

    Args:
        without: names to leave out.
    """
    held = list(own_attributes(value).items())
    named: list[Part] = [(Link.ATTRIBUTE, name, item) for name, item in held if name not in without]
    if isinstance(value, types.FunctionType):
        return _closure(value) + [(Link.DEFAULT, name, item) for name, item in default_arguments(value).items()] + named
    if isinstance(value, types.MethodType):
        return [(Link.ATTRIBUTE, "__self__", value.__self__), *named]
    names = slots(type(value)) + [name for kind, in_c in _C_ATTRIBUTES if isinstance(value, kind) for name in in_c]
    read = [(Link.ATTRIBUTE, name, read_attribute(value, name, _ABSENT)) for name in names]
    return named + [part for part in read if part[2] is not _ABSENT]


def put(value: Any, link: Link, name: Any, new: Any) -> None:
    """Replace a part of a mapping, list, deque or object by ``new``."""
    if link in (Link.KEY, Link.INDEX):
        (builtin_type(value) or type(value)).__setitem__(value, name, new)
    elif name in own_attributes(value):
        vars(value)[name] = new
    else:
        object.__setattr__(value, name, new)


# Per-class caches of classes that users create per model would grow forever without weak references.
_slots: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()


def slots(kind: type) -> list[str]:
    """Return the names of the slots of a class and its bases."""
    names = _slots.get(kind)
    if names is not None:
        return names
    bases = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    members = types.MemberDescriptorType
    names = [name for base in bases for name, value in vars(base).items() if isinstance(value, members)]
    return _slots.setdefault(kind, list(dict.fromkeys(names)))


def _closure(function: types.FunctionType) -> list[Part]:
    """Return the variables of a function's closure that have a value."""
    cells: list[Part] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells.append((Link.CELL, name, cell.cell_contents))
        except ValueError:
            continue
    return cells


def default_arguments(function: types.FunctionType) -> dict[str, Any]:
    """Return the default values of the arguments of a function, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}


Visit: TypeAlias = Callable[[Any], Iterable[Any]]


def walk(roots: Iterable[Any], visit: Visit, visited: dict[int, Any] | None = None) -> dict[int, Any]:
    """Call ``visit`` once for each object within reach of ``roots``; it returns the values to go on with.

    Args:
        visited: objects by id that are not visited again; new ones are added, which keeps their ids from being reused.

    Returns: ``visited``.
    """
    visited = {} if visited is None else visited
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) not in visited:
            visited[id(value)] = value
            waiting += visit(value)
    return visited


@dataclass(frozen=True, eq=False)
class IdentityRef:
    """A strong reference to an object that compares by identity; keeping it alive keeps its id unique."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityRef) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def plain_key(value: Any) -> tuple[type, Any]:
    """Return a key of a value of a type in `PLAIN`: 0.0 and -0.0 differ, and NaN equals itself."""
    for base, exact in _EXACT_VALUES:
        if isinstance(value, base):
            return type(value), exact(value)
    return type(value), value


def array_bytes(value: Any) -> bytes | None:
    """Return the bytes of a small array, such as one of numpy; None for anything else."""
    if isinstance(value, PLAIN):
        return None
    try:
        view = memoryview(value)
    except Exception:
        return None
    return view.tobytes() if view.nbytes <= _MAX_BYTES else None


def container_key(value: Any, leaf: Callable[[Any], Any], depth: int) -> Any:
    """Return a key of a value: plain values by value, containers by their items, other values by ``leaf``.

    Args:
        leaf: returns the key of a value that is no container, or one below ``depth`` nested containers.
    """
    kind = type(value)
    if kind in _EXACT:
        return kind, value
    if isinstance(value, SCALARS):
        return plain_key(value)
    if depth == 0 or size(value) > MAX_ITEMS:
        return leaf(value)
    if isinstance(value, MAPPINGS):
        held = [(k, v) for _, k, v in items(value)]
        return kind, tuple([(container_key(k, leaf, depth - 1), container_key(v, leaf, depth - 1)) for k, v in held])
    keys = [container_key(item, leaf, depth - 1) for _, _, item in items(value)]
    return kind, frozenset(keys) if isinstance(value, set | frozenset) else tuple(keys)


def size(value: Any) -> float:
    """Return the number of items of a container; infinity for other values."""
    if isinstance(value, types.MappingProxyType):
        return len(items(value))
    base = builtin_type(value)
    return float("inf") if base is None else int(base.__len__(value))


class Compound(NamedTuple):
    """The key of a value by its parts.

    Attributes:
        kind: the key of its type.
        parts: for each part, its link and name, and its key, in the order of the function `parts`. Elements of a set,
            which have neither name nor order, go by their keys.
    """

    kind: Any
    parts: tuple[tuple[tuple[Link, Any], Any], ...] | frozenset[tuple[tuple[Link, Any], Any]]


class KeyReader(ABC):
    """Return keys of whole values, with all that they refer to. An object that is met again counts as the same object.

    Two values of different readers have equal keys if they have equal leaves in the same places.
    """

    def __init__(self) -> None:
        # By id, each object with the path under which it was read first, and a number: other objects may come before it
        # in another value. It also keeps ids from being used again.
        self._visited: dict[int, tuple[tuple[str, int], Any]] = {}
        self._counts: dict[str, int] = {}

    def read(self, value: Any, path: str = "") -> Any:
        """Return the key of ``value``. ``path``: the expression that leads to it, for messages; empty without any."""
        kind = type(value)
        if kind in _EXACT:
            return kind, value
        if isinstance(value, PLAIN):
            # Subclasses of numbers and texts may have attributes.
            held = [] if isinstance(value, enum.Enum) else attributes(value)
            return self.compound(plain_key(value), held, path) if held else plain_key(value)
        key = self.leaf(value, path)
        if key is not None:
            return key
        if id(value) in self._visited:
            return "again", self._visited[id(value)][0]
        number = self._counts[path] = self._counts.get(path, 0) + 1
        self._visited[id(value)] = (path, number), value
        return self.read_new(value, path)

    @abstractmethod
    def leaf(self, value: Any, path: str) -> Any:
        """Return the key of a value that is not plain without looking into it, or None."""

    @abstractmethod
    def read_new(self, value: Any, path: str) -> Any:
        """Return the key of a value that is read for the first time."""

    def compound(self, kind: Any, parts: Iterable[Part], path: str) -> Compound:
        """Return the key of a value of ``kind`` by the keys of its ``parts``."""
        keys: list[tuple[tuple[Link, Any], Any]] = []
        for link, name, value in parts:
            below = name if isinstance(name, str) else safe_repr(name)
            key = self.read(value, f"{path}.{below}" if path and link is not Link.ELEMENT else path)
            label = self.name(name) if link is Link.KEY else key if link is Link.ELEMENT else name
            keys.append(((link, label), key))
        is_set = bool(keys) and keys[0][0][0] is Link.ELEMENT
        return Compound(kind, frozenset(keys) if is_set else tuple(keys))

    def name(self, key: Any) -> Any:
        """Return the key of a mapping's key."""
        return safe_repr(key)


def safe_repr(value: Any) -> str:
    """Return the ``repr`` of a value; the name of its class if that raises."""
    try:
        return repr(value)
    except Exception:
        return type(value).__qualname__

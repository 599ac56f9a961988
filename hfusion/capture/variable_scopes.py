"""Read and write variables outside of a model: of files, classes, objects, functions, closures and contexts."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from hfusion.core.fingerprint import is_user_code

MISSING = object()
"""The value of a variable that does not exist."""


@dataclass
class Holder(ABC):
    """An object that holds variables. ``names``: for each variable, the paths of the modules whose code names it."""

    title: str
    held: Any
    names: dict[str, set[str]] = field(default_factory=dict)

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
        return defaults(self.held).get(name, MISSING)

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
            return getattr(self.held, name, MISSING)
        return vars(self.held).get(name, MISSING)

    def write(self, name: str, value: Any) -> None:
        # A class of the user's may define __setattr__, which must not run here.
        bypass = is_user_code(type(self.held).__module__) and not isinstance(self.held, type)
        put, remove = (object.__setattr__, object.__delattr__) if bypass else (setattr, delattr)
        if value is MISSING:
            remove(self.held, name)
        else:
            put(self.held, name, value)


def defaults(function: types.FunctionType) -> dict[str, Any]:
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}


def slots(kind: type) -> frozenset[str]:
    """Return the names of the slots of a class and its bases."""
    bases = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    members = types.MemberDescriptorType
    return frozenset(name for base in bases for name, value in vars(base).items() if isinstance(value, members))

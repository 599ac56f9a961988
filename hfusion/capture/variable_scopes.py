"""Read and write variables outside of a model: of files, classes, objects, functions, closures and contexts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from hfusion.core.fingerprint import is_user_code
from hfusion.core.python_values import default_arguments, own_attributes, read_attribute, slots

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

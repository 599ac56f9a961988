"""Methods of modules that are others for a while."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import nn

# A module, the name of a method, and what is called instead.
Patch: TypeAlias = tuple[nn.Module, str, Callable[..., Any]]

_STANDARD = frozenset(vars(nn.Module)) - {"forward"}


_MARK = "hfusion_patch"


def is_patch(value: Any) -> bool:
    """Whether an attribute of a module is a method that `patched` put there."""
    return hasattr(value, _MARK)


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """While active, calls of these methods of these modules go elsewhere."""
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for module, name, method in patches:
            before.append((module, name, vars(module).get(name)))
            setattr(method, _MARK, True)
            vars(module)[name] = method
        yield
    finally:
        for module, name, own in reversed(before):
            if own is None:
                del vars(module)[name]
            else:
                vars(module)[name] = own


def methods(kind: type) -> list[str]:
    """The methods of a class of modules that compute: forward, and what its author wrote beside it."""
    found = []
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        of_torch = base.__module__ == "torch" or base.__module__.startswith("torch.")
        for name, value in vars(base).items():
            own = not of_torch and not name.startswith("__") and name not in _STANDARD
            plain = isinstance(value, types.FunctionType) and not inspect.isgeneratorfunction(value)
            if name not in found and plain and (own or name == "forward"):
                found.append(name)
    return found

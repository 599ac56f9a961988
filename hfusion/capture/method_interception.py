"""Temporarily call a handler in place of methods of modules. Only this file replaces methods."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from hfusion.capture.hooks import taken_off, with_hooks
from hfusion.core.fingerprint import is_user_code

_STANDARD = frozenset(vars(nn.Module)) - {"forward"}
_MARK = "hfusion_intercepted"


@dataclass(frozen=True)
class Island:
    """A method of a submodule, which may run as an eager fallback."""

    path: str
    method: str = "forward"

    def __str__(self) -> str:
        if self.method == "forward":
            return self.path or "forward"
        return f"{self.path}.{self.method}()" if self.path else f"{self.method}()"


WHOLE = Island("")


@dataclass(frozen=True, eq=False)
class Method:
    """A bound method, with the ``island`` that names it in the model."""

    island: Island
    module: nn.Module
    original: Callable[..., Any]


# Called in place of a method, with the method, its positional arguments and its keyword arguments.
Handler: TypeAlias = Callable[[Method, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def intercepted(model: nn.Module, islands: Iterable[Island], handle: Handler) -> Iterator[None]:
    """Context manager: call ``handle`` in place of the methods ``islands`` of ``model``.

    Hooks that are a part of a forward are called by `Method.original`, not around ``handle``.
    """
    replaced_methods: list[tuple[nn.Module, str, Any]] = []
    hooks = ExitStack()
    try:
        for island in islands:
            module = model.get_submodule(island.path)
            original = getattr(module, island.method)
            if island.method == "forward":
                original = with_hooks(module, original)
                hooks.enter_context(taken_off(module))
            replaced_methods.append((module, island.method, vars(module).get(island.method)))
            vars(module)[island.method] = _through(handle, Method(island, module, original))
        yield
    finally:
        hooks.close()
        for module, name, replaced in reversed(replaced_methods):
            if replaced is None:
                del vars(module)[name]
            else:
                vars(module)[name] = replaced


def _through(handle: Handler, method: Method) -> Callable[..., Any]:
    @functools.wraps(method.original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return handle(method, args, kwargs)

    setattr(called, _MARK, True)
    return called


def is_intercepted(value: Any) -> bool:
    """Return whether an attribute of a module is a method that `intercepted` put there."""
    return isinstance(value, types.FunctionType) and _MARK in vars(value)


def islands(model: nn.Module) -> Iterator[Island]:
    """Yield the methods of ``model`` and its submodules that compute: forward, and others that its class defines."""
    for path, module in model.named_modules():
        for name in _methods(type(module)):
            if name not in vars(module) or callable(vars(module)[name]):
                yield Island(path, name)


def _methods(kind: type) -> list[str]:
    """Return the names of the methods whose first definition in the MRO is a plain function of the user, or forward."""
    defined: dict[str, bool] = {}
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        # Of library classes, including the arrays of hfusion, only forward counts.
        library = not is_user_code(base.__module__)
        for name, value in vars(base).items():
            by_author = not library and not name.startswith("__") and name not in _STANDARD
            plain = isinstance(value, types.FunctionType) and not inspect.isgeneratorfunction(value)
            defined.setdefault(name, plain and (by_author or name == "forward"))
    return [name for name, computes in defined.items() if computes]

"""Hooks of modules, and the cache of parametrizations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as _modules
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _Orthogonal as Orthogonal

__all__ = [
    "BatchNorm",
    "Orthogonal",
    "RegisteredHook",
    "caches_parametrizations",
    "global_hooks",
    "has_global_hooks",
    "registered_hooks",
    "without_cached_parametrizations",
]

_TABLES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def global_hooks() -> list[tuple[str, Any]]:
    """Return the hooks that run at every call of any module, each with the name of its table."""
    if not has_global_hooks():
        return []
    return [(table, hook) for table in _TABLES for hook in getattr(_modules, table).values()]


@dataclass(frozen=True)
class RegisteredHook:
    """A hook of a module, with the method that registers it and the options that it takes."""

    hook: Callable[..., Any]
    method: str
    options: Mapping[str, bool]

    def register(self, module: nn.Module) -> None:
        getattr(module, self.method)(self.hook, **self.options)


def registered_hooks(module: nn.Module, predicate: Callable[[Any], bool]) -> list[RegisteredHook]:
    """Return the hooks of ``module`` for which ``predicate(hook)`` is true, each kind in the order of its calls."""
    held = vars(module)
    backward = "register_full_backward_hook" if held["_is_full_backward_hook"] else "register_backward_hook"
    methods = {
        "_forward_pre_hooks": "register_forward_pre_hook",
        "_forward_hooks": "register_forward_hook",
        "_backward_pre_hooks": "register_full_backward_pre_hook",
        "_backward_hooks": backward,
    }
    options = {
        "_forward_pre_hooks": {"with_kwargs": "_forward_pre_hooks_with_kwargs"},
        "_forward_hooks": {"with_kwargs": "_forward_hooks_with_kwargs", "always_call": "_forward_hooks_always_called"},
    }
    return [
        RegisteredHook(hook, method, {name: key in held[keys] for name, keys in options.get(table, {}).items()})
        for table, method in methods.items()
        for key, hook in held[table].items()
        if predicate(hook)
    ]


def caches_parametrizations() -> bool:
    """Return whether `torch.nn.utils.parametrize.cached` is active."""
    return bool(parametrize._cache_enabled)


@contextmanager
def without_cached_parametrizations() -> Iterator[None]:
    """Context manager: hide an outer `torch.nn.utils.parametrize.cached`."""
    cached = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = cached

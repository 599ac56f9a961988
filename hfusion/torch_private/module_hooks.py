"""Hooks of modules, and the cache of parametrizations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import module as _modules
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _Orthogonal as Orthogonal

__all__ = [
    "BatchNorm",
    "Orthogonal",
    "caches_parametrizations",
    "global_hooks",
    "has_global_hooks",
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

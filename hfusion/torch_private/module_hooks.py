"""Hooks of modules, and the cache of parametrizations."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from torch.nn.modules import module as _modules
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _Orthogonal as Orthogonal
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizers

from hfusion.torch_private.export_state import without_dynamo
from hfusion.torch_private.replaced_functions import replaced

# What is imported here for other files.
__all__ = ["Orthogonal", "has_global_hooks"]

_TABLES = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks")


def global_hooks() -> list[tuple[str, Any]]:
    """Return the hooks that run at every call of any module, each with the name of its table."""
    return [(table, hook) for table in _TABLES for hook in getattr(_modules, table).values()]


def caches_parametrizations() -> bool:
    """Return whether `torch.nn.utils.parametrize.cached` is active."""
    return bool(parametrize._cache_enabled)


def without_cached_parametrizations() -> AbstractContextManager[None]:
    """Context manager: hide an outer `torch.nn.utils.parametrize.cached`."""
    return replaced(parametrize, {"_cache_enabled": 0, "_cache": {}})


# Hooks of the steps of optimizers.


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def step_hooks(optimizer: Optimizer) -> dict[str, list[Any]]:
    """Return the hooks of the steps of ``optimizer`` itself, which torch leaves out of copies, by their attribute."""
    return {name: list(hooks.values()) for name in _HOOKS if (hooks := getattr(optimizer, name))}


def add_step_hooks(optimizer: Optimizer, held: dict[str, Any]) -> None:
    """Take what `step_hooks` returned out of ``held``, and register it."""
    registers = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
    for name, register in zip(_HOOKS, registers, strict=True):
        for hook in held.pop(name, ()):
            register(hook)


def has_step_hooks(optimizer: Optimizer) -> bool:
    return bool(step_hooks(optimizer))


def count_global_step_hooks() -> int:
    """Return the number of hooks that run at the steps of all optimizers."""
    return len(_optimizers._global_optimizer_pre_hooks) + len(_optimizers._global_optimizer_post_hooks)


@cache
def spare_dynamo() -> None:
    """Patch methods of all optimizers, for the rest of the process, so that they do not import Dynamo."""
    methods: Any = Optimizer
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        setattr(methods, name, without_dynamo(getattr(methods, name)))

"""Hooks of torch's own tools that are a part of forward: pruning, the old weight and spectral norm, observers.

Each computes from parameters and buffers, so that it is captured with the forward that it belongs to. Other hooks are
the user's code around a module, and are refused. Private to torch, tried on 2.11 to 2.14: that `nn.utils.prune` and its
like set an attribute before forward, and how observers are called after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod, PruningContainer
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_TABLES = ("_forward_pre_hooks", "_forward_hooks")
_OBSERVERS = frozenset({"_observer_forward_hook", "_observer_forward_pre_hook"})


def is_part_of_forward(hook: Any) -> bool:
    """Return whether ``hook`` is one of torch's own that computes from parameters and buffers alone."""
    if isinstance(hook, BasePruningMethod):
        kind = type(hook)
        return kind.__call__ is BasePruningMethod.__call__ and (
            kind.apply_mask in (BasePruningMethod.apply_mask, PruningContainer.apply_mask)
        )
    if type(hook) in (WeightNorm, SpectralNorm):
        return True
    return getattr(hook, "__name__", "") in _OBSERVERS and hook.__module__.startswith("torch.ao.quantization")


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of ``module`` that are a part of its forward, in the order of their calls."""
    for table in _TABLES:
        yield from filter(is_part_of_forward, getattr(module, table).values())


def recomputed(module: nn.Module) -> frozenset[str]:
    """Return the attributes of ``module`` that hooks set before each forward."""
    named = (_attribute(hook) for hook in module._forward_pre_hooks.values())
    return frozenset(name for name in named if name is not None)


def outdated(module: nn.Module) -> str | None:
    """Return an attribute that a hook of ``module`` reads before a later hook sets it; None if there is none."""
    read: set[str] = set()
    for hook in module._forward_pre_hooks.values():
        name = _attribute(hook)
        if name in read:
            return name
        if name is not None:
            read |= {f"{name}_{suffix}" for suffix in ("g", "v", "u", "orig", "mask")}
    return None


def _attribute(hook: Any) -> str | None:
    if isinstance(hook, BasePruningMethod) and is_part_of_forward(hook):
        return hook._tensor_name
    return hook.name if type(hook) in (WeightNorm, SpectralNorm) else None


def is_recipe(value: Any) -> bool:
    """Return whether ``value`` is a ``QConfig``, which served to prepare a model and is not read by forward."""
    return type(value).__name__ == "QConfig" and type(value).__module__.startswith("torch.ao.quantization")


def options(hook: Any) -> Any:
    """Return the options that a hook computes with, without those by which pruning chose its mask."""
    if isinstance(hook, BasePruningMethod):
        return "pruning", hook._tensor_name
    return type(hook).__name__, hook.__name__ if isinstance(hook, FunctionType) else vars(hook)


def recompute(model: nn.Module) -> None:
    """Compute the attributes that hooks set before forward, from the tensors of ``model``."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            name = _attribute(hook)
            if name is not None:
                with torch.no_grad():
                    setattr(module, name, _value(hook, module))


def _value(hook: Any, module: nn.Module) -> Tensor:
    if isinstance(hook, BasePruningMethod):
        value: Tensor = hook.apply_mask(module)
    elif isinstance(hook, WeightNorm):
        value = hook.compute_weight(module)
    else:
        value = hook.compute_weight(module, do_power_iteration=False)
    return value


def with_hooks(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` of ``module`` with the hooks around it that are a part of it."""
    before, after = ([h for h in getattr(module, t).values() if is_part_of_forward(h)] for t in _TABLES)
    if not before and not after:
        return forward

    def called(*args: Any, **kwargs: Any) -> Any:
        for hook in before:
            replaced = hook(module, args)
            if replaced is not None:
                args = replaced if isinstance(replaced, tuple) else (replaced,)
        output = forward(*args, **kwargs)
        for hook in after:
            replaced = hook(module, args, output)
            output = output if replaced is None else replaced
        return output

    return called


@contextmanager
def taken_off(module: nn.Module) -> Iterator[None]:
    """Context manager: remove the hooks of ``module`` that are a part of its forward."""
    tables = [getattr(module, table) for table in _TABLES]
    before = [dict(table) for table in tables]
    for table in tables:
        for number in [number for number, hook in table.items() if is_part_of_forward(hook)]:
            del table[number]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            others = {number: hook for number, hook in table.items() if number not in hooks}
            table.clear()
            table.update(hooks | others)

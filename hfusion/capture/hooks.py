"""What surrounds a module's forward: hooks of torch's own tools, and handlers that are called in place of methods.

Pruning, the old weight and spectral norm, and observers are hooks that compute from parameters and buffers. They are
captured with the forward that they belong to. Other hooks are the user's code around a module, and are refused. Private
to torch, tried on 2.11 to 2.14: that `nn.utils.prune` and its like set an attribute before forward, and how observers
are called after it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod, PruningContainer
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from hfusion.core.fingerprint import is_user_code

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
    return type(hook).__name__, hook.__name__ if isinstance(hook, types.FunctionType) else vars(hook)


def recompute(model: nn.Module) -> None:
    """Compute the attributes that hooks set before forward, from the tensors of ``model``."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if _attribute(hook) is not None:
                # In train mode, the power iteration of a spectral norm would go on.
                training, module.training = module.training, False
                with torch.no_grad():
                    hook(module, ())
                module.training = training


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


# Temporarily call a handler in place of methods of modules.

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
    replaced: list[tuple[nn.Module, str, Any]] = []
    try:
        for island in islands:
            module = model.get_submodule(island.path)
            original, new = getattr(module, island.method), dict[str, Any]()
            if island.method == "forward":
                original = with_hooks(module, original)
                for table in _TABLES:
                    hooks = getattr(module, table).items()
                    new[table] = OrderedDict((key, hook) for key, hook in hooks if not is_part_of_forward(hook))
            new[island.method] = _through(handle, Method(island, module, original))
            for name, value in new.items():
                replaced.append((module, name, vars(module).get(name)))
                vars(module)[name] = value
        yield
    finally:
        for module, name, before in reversed(replaced):
            if before is None:
                del vars(module)[name]
            else:
                vars(module)[name] = before


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

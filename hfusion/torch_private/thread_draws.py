"""Random draws of one thread from its own generator in place of torch's, which all threads share.

Each random operator is intercepted at a dispatch key that only such a thread has, before all others;
other operators cost the same as without. A `torch.utils._python_dispatch.TorchDispatchMode`
would see every operator, and make a loader of tensors three times as slow.
"""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

# Of the dispatch keys with priority over all others, the one that torch does not use.
_KEY = "TESTING_ONLY_GenericMode"

Swapped: TypeAlias = "Callable[[], AbstractContextManager[None]]"


class _ReadingThread(threading.local):
    """``generator``: this thread's CPU generator. ``swapped``: context manager that loads the states into torch."""

    generator: torch.Generator | None = None
    swapped: Swapped | None = None


_here = _ReadingThread()
_lock = threading.Lock()


@contextmanager
def drawing_from(generator: torch.Generator, swapped: Swapped) -> Iterator[None]:
    """Context manager: this thread draws, seeds and reads torch's random state as if ``generator`` were torch's own.

    Draws on accelerators are made within ``swapped()``.
    """
    with _lock:
        _intercepted()
    before = _here.generator, _here.swapped
    with _seeding.per_thread():
        _here.generator, _here.swapped = generator, swapped
        try:
            with torch._C._IncludeDispatchKeyGuard(torch._C._dispatch_key_parse(_KEY)):
                yield
        finally:
            _here.generator, _here.swapped = before


def seen_in_modes() -> AbstractContextManager[Any]:
    """Context manager: intercept operators called by a `TorchDispatchMode`, for which torch excludes our key."""
    if _here.generator is None:
        return nullcontext()
    hidden = torch._C._dispatch_tls_local_exclude_set()
    excluded = hidden - torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))
    guard: Any = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
    return cast("AbstractContextManager[Any]", guard)


def _in_child() -> None:
    """Reset a forked process: it draws from torch's generators, which no other thread of it uses."""
    global _lock
    # Another thread of the parent may have held the lock during the fork.
    _lock = threading.Lock()
    _seeding.reset()
    if _here.generator is not None:
        torch.default_generator.set_state(_here.generator.get_state())
        _here.generator = _here.swapped = None


@cache
def _intercepted() -> tuple[torch.library.Library, ...]:
    """Register the interception for the process, once; it does nothing in other threads."""
    rest, aten = torch.library.Library("_", "IMPL", _KEY), torch.library.Library("aten", "IMPL", _KEY)
    rest.fallback(torch.library.fallthrough_kernel)
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::"):
            continue
        indices = [k for k, entry in enumerate(schema.arguments) if str(entry.type) == "Optional[Generator]"]
        # On the CPU, every random operator is composed of operators that take a generator.
        if indices or (
            torch.accelerator.is_available() and torch.Tag.nondeterministic_seeded in _operator(schema).tags
        ):
            aten.impl(_operator(schema), _kernel(schema, *indices), with_keyset=True)
    # Higher-order operators have dispatch tables of their own.
    key: Any = torch._C._dispatch_key_parse(_KEY)
    for entry in torch._ops._higher_order_ops.values():
        entry.fallthrough(key)
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    return rest, aten


def _operator(schema: Any) -> Any:
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
    return getattr(packet, schema.overload_name or "default")


def _kernel(schema: Any, index: int | None = None) -> Callable[..., Any]:
    """Return the interceptor of an operator; ``index``: the index of its generator argument, if it has one."""
    operator = _operator(schema)
    key = torch._C._dispatch_key_parse(_KEY)
    key_set = torch._C.DispatchKeySet(key)
    shared: Any = torch.default_generator
    only_by_name = index is not None and schema.arguments[index].kwarg_only

    def draw(keys: Any, *args: Any, **kwargs: Any) -> Any:
        generator = kwargs.get("generator") if only_by_name or index is None else next(iter(args[index:]), None)
        # Several Python objects may stand for the same generator.
        has_other_generator = generator is not None and generator._cdata != shared._cdata
        # A `TorchDispatchMode` goes first; operators that it calls are intercepted within `seen_in_modes`.
        if _here.generator is None or has_other_generator or torch._C._len_torch_dispatch_stack():
            return operator.redispatch(keys - key_set, *args, **kwargs)
        if _on_accelerator(args, kwargs):
            assert _here.swapped is not None
            with _here.swapped(), torch._C._ExcludeDispatchKeyGuard(key_set):
                return operator(*args, **kwargs)
        if index is None:
            return operator.redispatch(keys - key_set, *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(key_set):
            if only_by_name:
                return operator(*args, **{**kwargs, "generator": _here.generator})
            return operator(*args[:index], generator=_here.generator, **kwargs)

    return draw


def _on_accelerator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws on an accelerator, not on the host."""
    devices = [value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    devices += [torch.device(kwargs["device"])] if kwargs.get("device") is not None else []
    return any(device.type not in ("cpu", "meta") for device in devices)


class _Default:
    """Forwards to this thread's generator, for functions such as `torch.manual_seed`, which are no operators."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_current(), name)


def _current() -> torch.Generator:
    return torch.default_generator if _here.generator is None else _here.generator


class _RandomModule(types.ModuleType):
    """The class of `torch.random` while a thread draws from its own generator.

    Functions of the module read the global, which is a `_Default`. Other code reads the attribute, a Generator.
    """

    @property
    def default_generator(self) -> torch.Generator:
        return _current()


class _Seeding:
    """Makes the functions of `torch.random` use the calling thread's generator while any thread has one."""

    def __init__(self) -> None:
        self._uses = 0

    @contextmanager
    def per_thread(self) -> Iterator[None]:
        with _lock:
            self._uses += 1
            # In this order no thread can ever read a `_Default` from the attribute.
            torch.random.__class__ = _RandomModule
            vars(torch.random)["default_generator"] = _Default()
        try:
            yield
        finally:
            with _lock:
                if self._uses <= 1:
                    self.reset()
                else:
                    self._uses -= 1

    def reset(self) -> None:
        """Restore `torch.random`, also in a forked process whose other threads no longer exist."""
        self._uses = 0
        vars(torch.random)["default_generator"] = torch.default_generator
        torch.random.__class__ = types.ModuleType


_seeding = _Seeding()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

"""Who exports: torch tells it to the whole process, where only one thread does.

Private to torch, tried on 2.11 and 2.13: the two flags behind `torch.compiler.is_compiling` and `is_exporting`, the
function that sets them for an export, what an export notes of itself, the calls that it writes for transforms, and
(tried on 2.13 and 2.14) the stack of modules of its tracer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch import predispatch
from torch._guards import detect_fake_mode, tracing
from torch.utils import _pytree as pytree

_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
_NOTES = ("_EXPORT_FLAGS", "_EXPORT_MODULE_HIERARCHY")


class _InThisThread:
    """True in the thread that made it; elsewhere what was true before."""

    def __init__(self, before: object) -> None:
        self._thread = threading.get_ident()
        self._before = before

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread or bool(self._before)

    # Who asks `torch.compiler.is_compiling()` gets this object, and computes with it as with a bool: as transformers,
    # by ``found |= other``.
    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    def __xor__(self, other: Any) -> Any:
        return bool(self) ^ other

    __ror__, __rand__, __rxor__ = __or__, __and__, __xor__

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __index__(self) -> int:
        return int(bool(self))


@contextmanager
def _as_before(owner: Any, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What ``owner`` has under ``names``, and has again afterwards."""
    before = {name: getattr(owner, name) for name in names}
    try:
        yield before
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _state() -> Iterator[None]:
    with _as_before(torch.compiler, _FLAGS) as flags:
        for name, flag in flags.items():
            setattr(torch.compiler, name, _InThisThread(flag))
        yield


@contextmanager
def told_here_only() -> Iterator[None]:
    """While active, an export is one for its own thread only: others train, and draw, as without it."""
    # Imported late: it imports Dynamo.
    from torch.export import _trace

    trace: Any = _trace
    with _as_before(trace, ("_compiling_state_context",)):
        trace._compiling_state_context = _state
        yield


@contextmanager
def module_stack_unwound() -> Iterator[None]:
    """While active, an error that a submodule raises leaves the tracer's stack of modules as it was before the call.

    Otherwise whoever catches the error ends in "Unexpected key ..., expected ...", at the next return of a module.
    """
    from torch.fx.experimental.proxy_tensor import _ModuleStackTracer

    call_module = _ModuleStackTracer.call_module

    def called(tracer: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(tracer.module_stack)
        try:
            return call_module(tracer, *args, **kwargs)
        except BaseException:
            while len(tracer.module_stack) > before:
                tracer.module_stack.popitem()
            raise

    with _as_before(_ModuleStackTracer, ("call_module",)):
        _ModuleStackTracer.call_module = called  # type: ignore[method-assign, assignment]
        yield


@contextmanager
def outside_export() -> Iterator[None]:
    """While active, what exports members is not noticed by the export that this thread is in."""
    from torch.export import _trace

    with _as_before(_trace, _NOTES), _as_before(torch.compiler, _FLAGS), tracing(None):
        for name in _FLAGS:
            setattr(torch.compiler, name, False)
        yield


def exporting() -> bool:
    """Whether this thread is in an export; that of another thread sets the flag, too, but no mode of fake tensors."""
    return bool(torch.compiler.is_exporting()) and detect_fake_mode() is not None


def transforms(module: fx.GraphModule) -> bool:
    """Whether forward calls `torch.vmap` or others of `torch.func`: the graph changes the level of its thread."""
    graphs = [found.graph for found in module.modules() if isinstance(found, fx.GraphModule)]
    targets = (node.target for graph in graphs for node in graph.nodes if node.op == "call_function")
    return any(getattr(target, "__module__", None) == predispatch.__name__ for target in targets)


@contextmanager
def counted_parts() -> Iterator[None]:
    """Export asks containers for the names of their parts; where a class tells none, they are counted.

    Private to torch: as of 2.11 to 2.15.
    """
    nodes = pytree.SUPPORTED_NODES
    nameless = {kind: node for kind, node in nodes.items() if node.flatten_with_keys_fn is None}
    nodes.update({kind: node._replace(flatten_with_keys_fn=_counting(node)) for kind, node in nameless.items()})
    try:
        yield
    finally:
        nodes.update(nameless)


def _counting(node: pytree.NodeDef) -> pytree.FlattenWithKeysFunc:
    def flatten(container: Any) -> Any:
        parts, context = node.flatten_fn(container)
        return [(pytree.SequenceKey(k), part) for k, part in enumerate(parts)], context

    return flatten

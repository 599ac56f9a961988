"""Contexts for an export, which set the state of torch, the thread and the module while forward is traced.

torch reports an export to the whole process, where only one thread exports. Captures are made without autocast, which
acts when their program runs, so that forward gets the answer of the caller's region. Buffers that forward assigns
(``self.mean = ...``) are written instead: torch.export sees such assignments in the root module only (2.11 to 2.15).

Private to torch, tried on 2.11 and 2.13: the two flags behind `torch.compiler.is_compiling` and `is_exporting`, the
function that sets them for an export, what an export notes of itself, the calls that it writes for transforms, and
(tried on 2.13 and 2.14) the stack of modules of its tracer.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import predispatch
from torch._guards import detect_fake_mode, tracing
from torch.utils import _pytree as pytree

from hfusion.core.errors import FusionError
from hfusion.core.fingerprint import is_installed
from hfusion.device.backend import AUTOCAST_QUESTIONS

_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
_NOTES = ("_EXPORT_FLAGS", "_EXPORT_MODULE_HIERARCHY")


class _InThisThread:
    """A flag that is True in the thread that created it, and has its previous value in others."""

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
    """Restore the attributes ``names`` of ``owner`` at the end."""
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
    """Context manager: an export affects its own thread only; others train and draw as without it."""
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
    """Context manager: hide the exports of members from an export that this thread is in."""
    from torch.export import _trace

    with _as_before(_trace, _NOTES), _as_before(torch.compiler, _FLAGS), tracing(None):
        for name in _FLAGS:
            setattr(torch.compiler, name, False)
        yield


def exporting() -> bool:
    """Return whether this thread exports. Another thread's export sets the flag too, but no fake tensor mode."""
    return bool(torch.compiler.is_exporting()) and detect_fake_mode() is not None


def transforms(module: fx.GraphModule) -> bool:
    """Return whether forward calls transforms of `torch.func`: such a graph changes the level of its thread."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    targets = (node.target for graph in graphs for node in graph.nodes if node.op == "call_function")
    return any(getattr(target, "__module__", None) == predispatch.__name__ for target in targets)


@contextmanager
def counted_parts() -> Iterator[None]:
    """Context manager: number the parts of containers for which an export finds no names.

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


@contextmanager
def told_autocast(active: Collection[str]) -> Iterator[None]:
    """Context manager: this thread's code sees autocast as enabled for devices of the types ``active``.

    Except in its own autocast regions, which are within that of the capture.

    Raises:
        FusionError: the code fails because of that.
    """
    was_asked = False
    here, outer = threading.get_ident(), _nesting()
    originals = {name: getattr(torch, name) for name in AUTOCAST_QUESTIONS if hasattr(torch, name)}

    def answering(name: str, original: Callable[..., bool]) -> Callable[..., bool]:
        def answer(*args: Any) -> bool:
            nonlocal was_asked
            of_us = threading.get_ident() == here and not is_installed(sys._getframe(1).f_globals.get("__name__"))
            if of_us and _nesting() == outer + 1:
                is_active = (args[0] if args else AUTOCAST_QUESTIONS[name]) in active
                was_asked |= is_active
                return is_active
            return original(*args)

        return answer

    for name, original in originals.items():
        setattr(torch, name, answering(name, original))
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if not was_asked:
            raise
        raise FusionError(
            f"forward checks whether autocast is on, and then runs code that fails without it ({error}); let "
            "autocast cast what torch's operators take, or switch it on inside forward"
        ) from error
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _nesting() -> int:
    """Return the number of nested autocast regions of this thread."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextmanager
def assigned_as_writes(module: nn.Module) -> Iterator[None]:
    """Context manager: at the end of each call of ``module``, copy assigned buffers into the original ones."""
    before: list[dict[tuple[str, str], Tensor]] = []

    def begin(module: nn.Module, args: Any) -> None:
        before.append(dict(_buffers(module)))

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        buffers = before.pop()
        now = dict(_buffers(module))
        changed = [key for key, tensor in buffers.items() if now.get(key) is not tensor]
        # What forward hands back of an old buffer keeps the old values.
        memory = {buffers[key].untyped_storage()._cdata for key in changed}
        output = pytree.tree_map_only(Tensor, lambda x: x.clone() if _in(x, memory) else x, output)
        for path, name in changed:
            _write(module, path, name, buffers[path, name], now.get((path, name)))
        return output

    handles = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _buffers(module: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    for path, part in module.named_modules():
        yield from (((path, name), tensor) for name, tensor in part._buffers.items() if tensor is not None)


def _in(tensor: Tensor, memory: set[int]) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in memory


def _write(module: nn.Module, path: str, name: str, old: Tensor, new: Tensor | None) -> None:
    full = f"{path}.{name}" if path else name
    if new is None or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise FusionError(
            f"forward assigns {full}, but not a tensor of the same shape, dtype and device; write into the buffer"
        )
    old.copy_(new.detach())
    module.get_submodule(path)._buffers[name] = old

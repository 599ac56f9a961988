"""The state of the process and the thread that `torch.export`, Dynamo and seeding change."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._C._dynamo.guards import TensorGuards as TensorGuards
from torch._functorch import predispatch
from torch._guards import tracing
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hfusion.torch_private.dispatch_modes import detect_fake_mode
from hfusion.torch_private.replaced_functions import replaced

_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
MODULES_BELOW_CODE = frozenset({"torch.overrides", "torch._tensor", "torch._subclasses.fake_tensor"})
"""The modules of torch between code that calls a function of torch, and the mode that sees the call."""
TRACERS = ("torch._", "torch.fx", "torch.export", "torch.utils._")
"""The beginnings of the names of modules that trace."""
_NOTES = ("_EXPORT_FLAGS", "_EXPORT_MODULE_HIERARCHY")


class _Modes(threading.local, torch._ops._ModeStackStateForPreDispatch):
    """The modes of exports, for each thread its own.

    torch keeps one list for the process. A thread that formats a tensor empties and then restores it: an export of
    another thread that ends between the two would stay in it for ever.
    """


def import_exporter() -> Any:
    """Return the module that exports, which torch imports at the first export, and Dynamo with it."""
    modes: Any = torch._ops._mode_stack_state_for_pre_dispatch
    if not (isinstance(modes, _Modes) or modes.count()):
        torch._ops._mode_stack_state_for_pre_dispatch = _Modes()  # type: ignore[no-untyped-call]
    return import_module("torch.export._trace")


def module_stack_unwound() -> AbstractContextManager[None]:
    """Context manager: an error in a submodule leaves the tracer's stack of modules as it was before the call.

    Otherwise code that catches the error fails with "Unexpected key ..., expected ..." at the next return of a module.
    """
    from torch.fx.experimental.proxy_tensor import _ModuleStackTracer

    call_module = _ModuleStackTracer.call_module

    def called(tracer: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(tracer.module_stack)
        try:
            return call_module(tracer, *args, **kwargs)
        finally:
            while len(tracer.module_stack) > before:
                tracer.module_stack.popitem()

    return replaced(_ModuleStackTracer, {"call_module": called})


@contextmanager
def outside_export() -> Iterator[None]:
    """Context manager: hide an outer export of this thread, so that members can be exported inside."""
    exporter = import_exporter()
    notes = {name: getattr(exporter, name) for name in _NOTES}
    with replaced(exporter, notes), replaced(torch.compiler, dict.fromkeys(_FLAGS, False)), outside_trace():
        yield


def exporting() -> bool:
    """Return whether this thread exports.

    An export in another thread sets the flag, too, but not the fake tensor mode of this thread.
    """
    return bool(torch.compiler.is_exporting()) and detect_fake_mode() is not None


def has_transforms(module: fx.GraphModule) -> bool:
    """Return whether a graph calls transforms of `torch.func`. Such a graph changes the level of its thread."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    targets = (node.target for graph in graphs for node in graph.nodes if node.op == "call_function")
    return any(getattr(target, "__module__", None) == predispatch.__name__ for target in targets)


@contextmanager
def numbered_parts() -> Iterator[None]:
    """Context manager: let an export number the parts of pytree containers that define no keys for them."""

    def numbered(node: pytree.NodeDef, container: Any) -> Any:
        parts, context = node.flatten_fn(container)
        return [(pytree.SequenceKey(k), part) for k, part in enumerate(parts)], context

    nodes = pytree.SUPPORTED_NODES
    nameless = {kind: node for kind, node in nodes.items() if node.flatten_with_keys_fn is None}
    nodes.update({kind: node._replace(flatten_with_keys_fn=partial(numbered, node)) for kind, node in nameless.items()})
    try:
        yield
    finally:
        nodes.update(nameless)


# State of Dynamo: its lock, its tensor guards, and the trace that a thread is in.


def tensor_guards(tensors: Sequence[Tensor]) -> TensorGuards:
    """Return torch's guards, which check if tensors have the same types, dtypes, devices, shapes and strides."""
    sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
    strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def compile_lock() -> AbstractContextManager[Any]:
    """Return the lock that a thread holds while Dynamo compiles. Imports Dynamo."""
    from torch._dynamo.convert_frame import compile_lock as lock

    return lock


def outside_trace() -> AbstractContextManager[Any]:
    """Context manager: hide the trace that this thread is in."""
    return tracing(None)


def uncompiled(model: Any) -> Any:
    """Return the module inside a wrapper of torch.compile; anything else as it is."""
    while type(model).__module__ == "torch._dynamo.eval_frame":
        model = model._orig_mod
    return model


# Call functions that torch hides from Dynamo without importing Dynamo, which takes a second.
#
# Torch imports Dynamo at their first call. As long as nothing else has imported it, there is nothing to hide from.

ModeClass = TypeVar("ModeClass", bound=type[TorchDispatchMode])


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of a torch function that hides from Dynamo only if Dynamo is imported."""
    plain = inspect.unwrap(function)

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (function if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return called


def sparing_dynamo(mode: ModeClass) -> ModeClass:
    """Class decorator for modes, whose methods torch hides from Dynamo when the class is created."""
    dispatch: Any = without_dynamo(mode.__torch_dispatch__)
    mode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    return mode


# The lock of `torch.manual_seed`, and the seeds that it keeps for accelerators that are not in use yet.


def seeding_locks() -> list[Any]:
    """Return the locks that `torch.manual_seed` takes."""
    modules = (torch.cuda, torch.xpu, torch.mtia)
    return [module._initialization_lock for module in modules if hasattr(module, "_initialization_lock")]


@contextmanager
def waiting_seeds_kept() -> Iterator[None]:
    """Context manager: an accelerator's first use takes the seed that it would have taken without the seeds set inside.

    torch keeps only the last seed of such a device.
    """
    modules = [module for module in (torch.cuda, torch.xpu, torch.mtia) if not module.is_initialized()]
    trackers = [dict(vars(module._lazy_seed_tracker)) for module in modules]
    try:
        yield
    finally:
        for module, tracker in zip(modules, trackers, strict=True):
            if module.is_initialized():
                # It was first used inside.
                for call in filter(None, tracker["call_order"]):
                    call[0]()
            else:
                vars(module._lazy_seed_tracker).update(tracker)

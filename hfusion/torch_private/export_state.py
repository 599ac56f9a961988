"""The state of the process and the thread that `torch.export` changes while it traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import fx
from torch._functorch import predispatch
from torch.utils import _pytree as pytree

from hfusion.torch_private.dispatch_modes import detect_fake_mode
from hfusion.torch_private.dynamo_state import outside_trace
from hfusion.torch_private.replaced_functions import replaced

_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
MODULES_BELOW_CODE = frozenset({"torch.overrides", "torch._tensor", "torch._subclasses.fake_tensor"})
"""The modules of torch between code that calls a function of torch, and the mode that sees the call."""
TRACERS = ("torch._", "torch.fx", "torch.export", "torch.utils._")
"""The beginnings of the names of modules that trace."""
_NOTES = ("_EXPORT_FLAGS", "_EXPORT_MODULE_HIERARCHY")


def _exporter() -> Any:
    # Imported late: it imports Dynamo.
    return import_module("torch.export._trace")


def import_exporter() -> None:
    """Import the module that exports, which torch does at the first export."""
    _exporter()


@contextmanager
def module_stack_unwound() -> Iterator[None]:
    """Context manager: an error in a submodule leaves the tracer's stack of modules as it was before the call.

    Otherwise code that catches the error fails with "Unexpected key ..., expected ..." at the next return of a module.
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

    with replaced(_ModuleStackTracer, {"call_module": called}):
        yield


@contextmanager
def outside_export() -> Iterator[None]:
    """Context manager: hide an outer export of this thread, so that members can be exported inside."""
    exporter = _exporter()
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

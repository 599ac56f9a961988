"""Calls that write into a tensor given as ``out=``, as calls that give a result, and copies of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.passes.views import infer, location

aten = torch.ops.aten


def out_arguments(target: Any) -> list[str]:
    """The names of the arguments that ``target`` writes its results into; empty unless it is an ``out=`` form."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return []
    written = [a for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [a.name for a in written] if all(a.kwarg_only for a in written) else []


def without_out(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Write an ``out=`` call of another graph, whose operands are nodes of ``graph``, as a call that gives its results.

    Returns: the call, and the tensors that its results are to be copied into.

    Raises:
        FusionError: the operator has no form without ``out=``, or its results have other shapes than the tensors.
    """
    names = out_arguments(node.target)
    functional, extra = _functional(node, names)
    kwargs = {name: value for name, value in node.kwargs.items() if name not in names}
    tensors: list[fx.Node] = [node.kwargs[name] for name in names]  # type: ignore[misc]
    example = tensors[0].meta["val"]
    kwargs |= {name: getattr(example, name) for name in ("dtype", "device") if name in extra}
    call = graph.call_function(functional, node.args, kwargs)
    call.meta.update({name: node.meta[name] for name in ("stack_trace", "nn_module_stack") if name in node.meta})
    call.meta["val"] = infer(functional, call.args, call.kwargs)
    results = call.meta["val"] if len(names) > 1 else [call.meta["val"]]
    for tensor, result in zip(tensors, results, strict=True):
        if tensor.meta["val"].shape != result.shape:
            raise FusionError(
                f"{location(node)}: {node.target} resizes the tensor given as out=; give one of the shape "
                f"{tuple(result.shape)}, or use the result"
            )
    return call, tensors


def _functional(node: fx.Node, names: list[str]) -> tuple[OpOverload, list[str]]:
    """The form without ``out=``, and the names of the arguments that only it has."""
    target = node.target
    assert isinstance(target, OpOverload)
    arguments = [(a.name, str(a.type)) for a in target._schema.arguments if a.name not in names]
    packet = target.overloadpacket
    for overload in packet.overloads():
        candidate: OpOverload = getattr(packet, overload)
        extra = candidate._schema.arguments[len(arguments) :]
        alike = [(a.name, str(a.type)) for a in candidate._schema.arguments[: len(arguments)]] == arguments
        if alike and not candidate._schema.is_mutable and all(a.has_default_value() for a in extra):
            return candidate, [a.name for a in extra]
    raise FusionError(f"{location(node)}: {target} has no form without out=; use its result")

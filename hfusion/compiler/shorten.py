"""Shorten a batch to a few samples, if that changes nothing but the run time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import Compiled
from hfusion.core.calls import StackedInput
from hfusion.core.copies import fills_stretch
from hfusion.core.memory import is_plain
from hfusion.core.program import Kind
from hfusion.core.tree import leaves

FEW = 4


def shortened(compiled: Compiled, arguments: Arguments) -> Arguments | None:
    """Return the first samples of ``arguments``, with the same memory order of dims, which forward may read.

    None if the program does not hold for fewer samples, looks up samples, or takes slices of wider tensors.
    """
    slots = compiled.program.slots
    placeholders = [node for node in compiled.graph.nodes if node.op == "placeholder"]
    inputs = [node for node, slot in zip(placeholders, slots, strict=True) if slot.kind is Kind.INPUT]
    rows = [leaf.tensor[0] if isinstance(leaf, StackedInput) else leaf for leaf in arguments.leaves]
    slices = any(isinstance(row, Tensor) and is_plain(row) and not fills_stretch(row) for row in rows)
    if slices or looks_up_samples(compiled.graph, inputs):
        return None
    pairs = zip(arguments.leaves, inputs, strict=True)
    short = Arguments(tuple(_first(leaf, node.meta.get("val")) for leaf, node in pairs), arguments.spec)
    return short if compiled.guards(short.shapes) else None


def _first(leaf: Any, example: Any) -> Any:
    if isinstance(leaf, StackedInput):
        rows = leaf.tensor
        return StackedInput(_first(rows.transpose(0, 1), example).transpose(0, 1)) if rows.dim() > 1 else leaf
    varies = isinstance(example, Tensor) and example.dim() > 0 and not isinstance(example.shape[0], int)
    if not varies:
        return leaf
    return leaf[:FEW] if leaf.is_contiguous() else leaf[:FEW].clone()


def looks_up_samples(graph: fx.Graph, inputs: list[fx.Node]) -> bool:
    """Return whether integers computed from ``inputs`` may be indices into a dim whose size varies.

    An example are the edges of a graph passed with its nodes: with fewer nodes some edges would be out of range.
    """
    derived = set(inputs)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        operands = [a for a in leaves((node.args, node.kwargs), fx.Node) if not _looks_alike(node, a)]
        for k, operand in enumerate(operands):
            if operand in derived and _integers(operand) and any(map(_varies, operands[:k] + operands[k + 1 :])):
                return True
        if any(a in derived for a in node.all_input_nodes):
            derived.add(node)
    return False


def _looks_alike(node: fx.Node, operand: fx.Node) -> bool:
    """Return whether the call is pointwise in the operand or views it, and so cannot use its values as indices."""
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    if torch.Tag.pointwise in target.tags:
        return True
    first = target._schema.arguments[0].alias_info if target._schema.arguments else None
    return first is not None and not first.is_write and node.args[0] is operand


def _integers(node: fx.Node) -> bool:
    example = node.meta.get("val")
    kinds = [e.dtype for e in leaves(example, Tensor)]
    return any(not k.is_floating_point and not k.is_complex and k is not torch.bool for k in kinds)


def _varies(node: fx.Node) -> bool:
    """Return whether a value is a dynamic size, or has one."""
    example = node.meta.get("val")
    if isinstance(example, torch.SymInt):
        return True
    return any(not isinstance(size, int) for e in leaves(example, Tensor) for size in e.shape)

"""Find the views among the nodes of a captured graph, from their fake tensors."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.ops.rule import hint
from hfusion.torch_private.dispatch_modes import enable_python_dispatcher
from hfusion.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from hfusion.torch_private.operator_tables import is_composite

aten = torch.ops.aten

# They give the input itself where they drop nothing. Their traces say that they copy it.
DROPOUTS = frozenset(
    {
        aten.dropout.default,
        aten.feature_dropout.default,
        aten.alpha_dropout.default,
        aten.feature_alpha_dropout.default,
    }
)

# Operators whose result, if it is a view, contains all elements of the operand.
IDENTITY = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default}) | DROPOUTS

RESHAPES = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.contiguous.default,
        aten.to.dtype,
        aten.to.device,
        aten.to.dtype_layout,
        aten.view_as.default,
    }
)

# Operators whose results are views side by side.
LISTS = frozenset(
    {
        aten.unbind.int,
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.tensor_split.sections,
        aten.tensor_split.indices,
    }
)


def writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the base of ``node``, None if it is no view; an item of a list of views has the base of the list."""
    if node.target is operator.getitem:
        call = node.args[0]
        assert isinstance(call, fx.Node)
        return viewed(call) if call.target in LISTS else _handed_on(call, node)
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    aliased = schema.arguments and schema.arguments[0].alias_info is not None
    if not aliased or not any(r.alias_info is not None for r in schema.returns):
        return _handed_on(node, node)
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source if _shares_storage(node, source) else None


def _handed_on(call: fx.Node, result: fx.Node) -> fx.Node | None:
    """The operand that a composite operator gives back, or a view of it, though its schema does not say so."""
    if not _composite(call.target):
        return None
    if call.target in DROPOUTS:
        return handed_back(call)
    example = result.meta.get("val")
    return next((operand for operand in call.all_input_nodes if _same_storage(operand.meta.get("val"), example)), None)


def _composite(target: Any) -> bool:
    """True for a composite operator that writes into no operand."""
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    return is_composite(target.name())


def handed_back(call: fx.Node) -> fx.Node | None:
    """Return the operand that a call returns itself, if any, judged with symbols replaced by numbers."""
    if not _composite(call.target) or not isinstance(call.meta.get("val"), Tensor):
        return None
    mode = FakeTensorMode()
    with mode:
        examples = {operand: _of_numbers(operand.meta.get("val")) for operand in call.all_input_nodes}
        if any(example is None for example in examples.values()):
            return None
        args, kwargs = fx.map_arg((call.args, dict(call.kwargs)), examples.__getitem__)
        result = call.target(*args, **kwargs)  # type: ignore[operator]
    return next((operand for operand, example in examples.items() if example is result), None)


def _of_numbers(value: Any) -> Any:
    """The like of a value, with a number for every symbol; None where there is none."""
    if not isinstance(value, Tensor):
        return hint(value) if isinstance(value, torch.SymInt) else value
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return None
    sizes, strides = ([hint(n) for n in numbers] for numbers in (value.shape, value.stride()))
    if None in sizes or None in strides:
        return None
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)  # type: ignore[arg-type]


def _same_storage(a: Any, b: Any) -> bool:
    # A sparse tensor has several storages, and is no view.
    strided = all(isinstance(x, Tensor) and x.layout is torch.strided for x in (a, b))
    return strided and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _shares_storage(node: fx.Node, source: fx.Node) -> bool:
    """True if a call that may return a view returns one when run on the fake tensors."""
    example = source.meta.get("val")
    if not isinstance(example, Tensor):
        return True
    result = infer(node.target, node.args, node.kwargs)
    parts = result if isinstance(result, list | tuple) else [result]
    return any(_same_storage(part, example) for part in parts)


def infer(target: Any, args: Any, kwargs: Any) -> Any:
    """The (fake) result of a call, from the examples of its operands."""
    values = fx.map_arg((args, dict(kwargs)), lambda n: n.meta["val"])
    fakes = [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, FakeTensor)]
    if not fakes:
        return target(*values[0], **values[1])
    sizes = [size for fake in fakes for size in fake.shape]
    # Sizes that vary need the operators' Python forms, which copy where the others may hand on their input.
    python = enable_python_dispatcher() if any(not isinstance(size, int) for size in sizes) else nullcontext()
    with python, fakes[0].fake_mode:
        return target(*values[0], **values[1])


def location(node: fx.Node) -> str:
    lines = [line.strip() for line in node.meta.get("stack_trace", "").strip().splitlines() if line.strip()]
    return " ".join(lines[-2:]) if lines else f"node {node.name}"

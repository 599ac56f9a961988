"""Sizes with numbers put in for symbols, and the floating-point operations of a member's operators."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.device.backend import active_autocast
from hfusion.ops import lowering as records
from hfusion.ops.lowering import Shape, Sizes
from hfusion.ops.saved import rows_and_matrices
from hfusion.passes.candidates import by_name

Shapes: TypeAlias = Mapping[str, Any]
Formula: TypeAlias = Callable[[Shapes, Shape], int]
# The numbers to put in for the symbols of a capture: one for all of them, or one for each, see `symbol_sizes`.
SymbolSizes: TypeAlias = int | frozenset[tuple[Any, int]]


def concrete(sizes: Sequence[int | torch.SymInt], batch: SymbolSizes) -> Shape:
    """Return ``sizes`` with numbers in place of symbols."""
    return tuple(size if isinstance(size, int) else _number(size.node.expr, batch) for size in sizes)


@functools.lru_cache(maxsize=4096)
def _number(expression: Any, batch: SymbolSizes) -> int:
    # A size that depends on values, such as the number of nonzero elements, counts like the largest input.
    default = batch if isinstance(batch, int) else max((number for _, number in batch), default=1)
    numbers = {} if isinstance(batch, int) else dict(batch)
    return int(expression.subs({symbol: numbers.get(symbol, default) for symbol in expression.free_symbols}))


def floating(example: Any) -> bool:
    """Return whether a value, or a part of it, is a tensor of floating-point or complex numbers."""
    parts = example if isinstance(example, list | tuple) else (example,)
    return any(isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex()) for part in parts)


def bytes_of(value: Any, batch: SymbolSizes) -> int:
    """Bytes of one member's tensor or nest of tensors; 0 for anything else."""
    if isinstance(value, list | tuple):
        return sum(bytes_of(part, batch) for part in value)
    return math.prod(concrete(value.shape, batch)) * value.element_size() if isinstance(value, Tensor) else 0


def family(node: fx.Node) -> str:
    """`hfusion.ops.lowering.family` of the operator that a member's node calls."""
    return records.family(node.target)


def sizes_of(node: fx.Node, batch: SymbolSizes) -> Sizes:
    """Return the `Sizes` of a member's ATen call: shapes of operands and result."""
    example = node.meta["val"]
    first = example[0] if isinstance(example, list | tuple) and example else example
    if not isinstance(first, Tensor):
        # Members' own code that returns no tensor.
        return Sizes(_shapes(node, batch), (0,), 0)
    return Sizes(_shapes(node, batch), concrete(first.shape, batch), int(first.element_size()))


def dtype_of(node: fx.Node) -> torch.dtype:
    """Return the dtype in which a member's ATen call computes its products: that of its first result, or autocast's.

    Graphs are captured without the caller's autocast, which acts when the program runs.
    """
    example = node.meta["val"]
    first = example[0] if isinstance(example, list | tuple) and example else example
    if not isinstance(first, Tensor):
        return torch.float32
    autocast = dict(active_autocast() or ()) if first.dtype is torch.float32 else {}
    return autocast.get(first.device.type, first.dtype)


def flops(node: fx.Node, batch: SymbolSizes) -> int:
    """Floating-point operations of one member's ATen call: products and sums of the matrix families, else 0.

    A multiplication and an addition are two. Recurrent layers and calls that run a submodule's own code count
    as one product of every row of their input with all their matrices.
    """
    formula = _FORMULAS.get(family(node))
    if formula is None or not isinstance(node.target, OpOverload):
        return 0
    return formula(_shapes(node, batch), _shape(node, batch))


def products(node: fx.Node, trained: Sequence[Any]) -> float:
    """Return the ratio of arithmetic in backward to forward. ``trained``: the operands that get a gradient."""
    if family(node) == "scaled_dot_product_attention":
        return 2.5
    return min(2, sum(isinstance(example, Tensor) and example.dim() >= 2 for example in trained))


def _shapes(node: fx.Node, batch: SymbolSizes) -> Shapes:
    assert isinstance(node.target, OpOverload)
    arguments = by_name(node.target, node.args, node.kwargs)
    return {name: _shape(item, batch) for name, item in arguments.items()}


def _shape(item: Any, batch: SymbolSizes) -> Any:
    """Return shapes in place of nodes with tensors, nested in lists like the arguments; the others unchanged."""
    if isinstance(item, list | tuple):
        return [_shape(part, batch) for part in item]
    value = item.meta.get("val") if isinstance(item, fx.Node) else item
    return concrete(value.shape, batch) if isinstance(value, Tensor) else value


def _times(first: str) -> Formula:
    """Return a formula for products that sum over the last dim of the factor named ``first``."""
    return lambda shapes, out: 2 * math.prod(out) * int(shapes[first][-1])


def _convolution(shapes: Shapes, out: Shape) -> int:
    """Count operations: one filter ``weight[o]`` per result or, if transposed, ``weight[i]`` per input."""
    positions: Shape = shapes["input"] if shapes.get("transposed") else out
    filters: Shape = shapes["weight"]
    return 2 * math.prod(positions) * math.prod(filters[1:])


def _transposed(shapes: Shapes, out: Shape) -> int:
    return _convolution({**shapes, "transposed": True}, out)


def _einsum(shapes: Shapes, out: Shape) -> int:
    """Count operations: every element of the result is a sum over the letters that the result lacks."""
    inputs, _, result = shapes["equation"].replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, shape in zip(inputs.split(","), shapes["tensors"], strict=True):
        front, _, back = term.partition("...")
        sizes |= dict(zip(front, shape, strict=False))
        sizes |= dict(zip(reversed(back), reversed(shape), strict=False))
    return 2 * math.prod(out) * math.prod(size for letter, size in sizes.items() if letter not in result)


def _rows(shapes: Shapes, out: Any) -> int:
    rows, matrices = rows_and_matrices(shapes)
    return 2 * rows * sum(math.prod(shape) for shape in matrices)


# Operators that hold many products, of which no graph tells.
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "opaque"})

_FORMULAS: dict[str, Formula] = dict.fromkeys(RECURRENT, _rows) | {
    "linear": _times("input"),
    "matmul": _times("self"),
    "mm": _times("self"),
    "bmm": _times("self"),
    "mv": _times("self"),
    "dot": _times("self"),
    "addmm": _times("mat1"),
    "addmv": _times("mat"),
    "baddbmm": _times("batch1"),
    "addbmm": lambda shapes, out: 2 * math.prod(shapes["batch1"]) * shapes["batch2"][-1],
    "bilinear": lambda shapes, out: 2 * math.prod(out) * math.prod(shapes["weight"][1:]),
    "einsum": _einsum,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "convolution": _convolution,
    "conv_transpose1d": _transposed,
    "conv_transpose2d": _transposed,
    "conv_transpose3d": _transposed,
    "scaled_dot_product_attention": lambda shapes, out: (
        2 * math.prod(shapes["query"][:-1]) * shapes["key"][-2] * (shapes["query"][-1] + shapes["value"][-1])
    ),
}

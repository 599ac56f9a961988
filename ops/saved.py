"""The memory that torch's operators keep for backward, and which of them return views.

Estimates on the careful side; torch's table of derivatives is ``tools/autograd/derivatives.yaml``. A lowering that does
not keep what its operator keeps says so itself.
"""

from __future__ import annotations

import math
from typing import Any

from torch._ops import OpOverload

from hfusion.ops.lowering import KeptOperands, Saves, Shape, Sizes, View, family
from hfusion.torch_private.operator_tables import is_composite


def elements(shape: Shape) -> int:
    return math.prod(shape)


def result_bytes(sizes: Sizes) -> int:
    return elements(sizes.result) * sizes.width


def first_operand_bytes(sizes: Sizes) -> int:
    shape = next((shape for shape in sizes.operands.values() if isinstance(shape, tuple)), ())
    return elements(shape) * sizes.width


def _indices(sizes: Sizes) -> int:
    """An int64 for every value of the result."""
    return 8 * elements(sizes.result)


def row_statistics(sizes: Sizes) -> int:
    """Two values for every row along the last dim."""
    return 2 * result_bytes(sizes) // max(1, sizes.result[-1])


def broadcast_copies(sizes: Sizes) -> int:
    """Return the bytes that a batched matrix product copies to expand factors that lack dims of the result."""
    copied = 0
    for shape in sizes.operands.values():
        if isinstance(shape, tuple) and 2 <= len(shape) < len(sizes.result):
            repeats = elements(sizes.result[:-2]) // max(1, elements(shape[:-2]))
            copied += repeats * elements(shape) * sizes.width
    return copied


def scores(sizes: Sizes) -> int:
    """Return the number of attention weights ``[..., L, S]``."""
    return elements(sizes.operands["query"][:-1]) * int(sizes.operands["key"][-2])


def queries(sizes: Sizes) -> int:
    """Bytes of a value for every query of attention."""
    return elements(sizes.operands["query"][:-1]) * sizes.width


def rows_and_matrices(operands: Any) -> tuple[int, list[Shape]]:
    """Return the number of rows of a recurrent layer's input, and the shapes of its matrices."""
    tensors = _shapes(list(operands.values())) or [()]
    return elements(tensors[0][:-1]), [shape for shape in tensors[1:] if len(shape) == 2]


def _shapes(items: Any) -> list[Shape]:
    """Return the shapes in nested ``items``, in which shapes are tuples and everything but lists is ignored."""
    shapes: list[Shape] = []
    for item in items:
        if isinstance(item, tuple):
            shapes.append(item)
        elif isinstance(item, list):
            shapes += _shapes(item)
    return shapes


def gates(sizes: Sizes) -> int:
    """Bytes of the products of a recurrent layer's matrices for all rows of its input."""
    rows, matrices = rows_and_matrices(sizes.operands)
    return rows * sum(shape[0] for shape in matrices) * sizes.width


def gates_twice(sizes: Sizes) -> int:
    """oneDNN's LSTM keeps 16 values per unit and row, of which its matrices give 8."""
    return 2 * gates(sizes)


NOTHING = Saves(KeptOperands.NONE)
RESULT = Saves(KeptOperands.NONE, result=True)
FACTORS = Saves(KeptOperands.FACTORS)
MASK = Saves(KeptOperands.NONE, extra_bytes=result_bytes)
ROWS = Saves(extra_bytes=row_statistics)
FUSED_ATTENTION = Saves(KeptOperands.FACTORS, result=True, extra_bytes=queries)
GATES = Saves(extra_bytes=gates, workspace=gates)
GATES_TWICE = Saves(extra_bytes=gates_twice, workspace=gates_twice)

_KEPT = {
    # The gradient needs no operand, only sizes.
    NOTHING: """
        add sub rsub neg sum mean cumsum cat stack adaptive_avg_pool1d
        clone contiguous to _to_copy copy detach repeat roll flip pad constant_pad_nd
        upsample_nearest2d upsample_bilinear2d slice_scatter select_scatter
    """,
    # The derivative is written in the result, or follows the indices that it returns.
    RESULT: """
        tanh sigmoid exp softmax _softmax log_softmax _log_softmax
        relu sqrt rsqrt reciprocal max min sort topk
    """,
    FACTORS: """
        mul div linear mm bmm mv dot addmm addmv baddbmm addbmm bilinear einsum
        conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d
    """,
    MASK: "dropout feature_dropout alpha_dropout feature_alpha_dropout native_dropout",
    ROWS: "layer_norm rms_norm",
    Saves(KeptOperands.FACTORS, extra_bytes=broadcast_copies, workspace=broadcast_copies): "matmul",
    Saves(extra_bytes=first_operand_bytes): "cross_entropy_loss",
    Saves(extra_bytes=_indices): "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d",
    FUSED_ATTENTION: "scaled_dot_product_attention",
    GATES: "gru rnn_tanh rnn_relu",
    GATES_TWICE: "lstm opaque",
}
_BY_NAME = {name: saves for saves, names in _KEPT.items() for name in names.split()}


def saved_by(target: Any) -> Saves:
    """Return what autograd keeps for a call of ``target``: nothing for views, all operands if it is unknown."""
    saves = _BY_NAME.get(family(target))
    if saves is not None:
        return saves
    return NOTHING if view_of(target).likely else Saves()


# A stacked or packed operand may be stored in another order than a member's, and is reshaped, never viewed.
_USUALLY = frozenset(["view", "view_as", "unflatten", "as_strided", "to"])
_IN_ORDER = frozenset(["reshape", "reshape_as", "flatten", "ravel", "_unsafe_view", "contiguous"])


def view_of(target: Any, casts: bool = False) -> View:
    """Return whether ``target`` returns a view, by its schema. ``casts``: the operand has another dtype.

    Composite operators may return their operand although their schemas do not say so.
    """
    if not isinstance(target, OpOverload):
        return View.NEVER
    name, returns = family(target), target._schema.returns
    if name == "to" and casts:
        return View.NEVER
    if name in _USUALLY or name in _IN_ORDER:
        return View.USUALLY if name in _USUALLY else View.IN_ORDER
    if returns and returns[0].alias_info is not None:
        return View.ALWAYS
    return View.PERHAPS if is_composite(target.name()) else View.NEVER

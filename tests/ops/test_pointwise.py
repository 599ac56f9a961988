from __future__ import annotations

from typing import Any

import pytest
import torch

from hfusion.core.layout import CONVERSIONS, Layout
from hfusion.ops.pointwise import RULES
from hfusion.passes.batch import batch
from tests.oracle import Case, Draw, check, member_graph, t

aten = torch.ops.aten

X = t(2, 3, 2, 4)
POSITIVE = t(2, 3, kind="positive")
UNIT = t(2, 3, kind="unit")
INTS = t(2, 3, kind="integers", high=5)

# Shapes that meet x [N, C, H, W].
PARTNERS = [
    X,
    t(3, 1, 1),
    t(1, 3, 1, 1),
    t(2, 1, 1, 1),
    t(),
    t(2, 4),
    t(1),
    t(3, 2, 4),
    t(1, 1, 1, 1),
    t(2, 1, 2, 4),
]

UNARY = """
relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus softshrink
hardshrink log_sigmoid sigmoid tanh exp expm1 sin cos tan atan sinh cosh asinh erf erfc abs neg sign
square floor ceil round trunc frac nan_to_num isnan isfinite sgn positive absolute clone detach alias
contiguous zeros_like ones_like zero
"""
IN_UNIT = """
log log1p log2 log10 sqrt rsqrt reciprocal logit asin acos atanh lgamma digamma erfinv special_entr
"""
BINARY = """
add.Tensor sub.Tensor mul.Tensor div.Tensor maximum.default minimum.default atan2.default fmax.default
eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and.default logical_or.default
logical_xor.default logaddexp.default hypot.default max.other min.other isclose.default multiply.Tensor
subtract.Tensor
"""
INTEGERS = """
bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor gcd.default remainder.Scalar add.Scalar
"""


def op(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


CASES = [
    *(Case(op(name), (X,), members=(1, 3)) for name in UNARY.split()),
    *(Case(op(name), (UNIT,), members=(2,)) for name in IN_UNIT.split()),
    *(Case(op(name), (t(2, 3), t(3))) for name in BINARY.split()),
    *(Case(aten.mul.Tensor, (X, y)) for y in PARTNERS),
    Case(aten.clamp.Tensor, (X, X, X), members=(1, 3)),
    Case(aten.clamp.Tensor, (X, t(4), None), members=(3,)),
    *(Case(aten.sub.Tensor, (y, X), {"alpha": 2}) for y in PARTNERS),
    *(Case(op(name), (INTS, 3 if name.endswith("Scalar") else INTS), members=(2,)) for name in INTEGERS.split()),
    Case(aten.bitwise_not.default, (INTS,)),
    Case(aten.logical_not.default, (t(2, 3, kind="bool"),)),
    Case(aten.add.Tensor, (t(), t())),
    Case(aten.add.Scalar, (t(), 2.5)),
    Case(aten.add.Tensor, (t(2, 3), 2.5)),
    Case(aten.rsub.Scalar, (t(2, 3), 2.5)),
    Case(aten.rsub.Tensor, (t(2, 3), t(3))),
    Case(aten.pow.Tensor_Tensor, (POSITIVE, t(3))),
    Case(aten.pow.Tensor_Scalar, (POSITIVE, 3)),
    Case(aten.pow.Scalar, (2.0, POSITIVE)),
    Case(aten.xlogy.Tensor, (POSITIVE, POSITIVE)),
    Case(aten.div.Tensor_mode, (X, t(3, 1, 1, kind="positive")), {"rounding_mode": "floor"}),
    Case(aten.remainder.Tensor, (X, t(3, 1, 1, kind="positive"))),
    Case(aten.clamp.default, (X, -0.5, 0.5)),
    Case(aten.clamp.Tensor, (X, t(3, 1, 1), None)),
    Case(aten.clamp_min.default, (X, 0.1)),
    Case(aten.lerp.Scalar, (X, X, 0.3)),
    Case(aten.lerp.Tensor, (X, t(3, 1, 1), t())),
    Case(aten.addcmul.default, (X, t(3, 1, 1), t(4)), {"value": 0.5}),
    Case(aten.addcdiv.default, (X, t(3, 1, 1), t(4, kind="positive"))),
    Case(aten.where.self, (t(2, 1, 2, 4, kind="bool"), X, t(3, 1, 1))),
    Case(aten.where.self, (t(2, 4, kind="bool"), X, t())),
    Case(aten.where.ScalarOther, (t(2, 3, kind="bool"), t(2, 3), 0.0)),
    Case(aten.masked_fill.Scalar, (X, t(2, 1, 2, 4, kind="bool"), -1e9)),
    Case(aten.masked_fill.Scalar, (t(3, 4), t(2, 3, 4, kind="bool"), 0.0)),
    Case(aten.masked_fill.Tensor, (X, t(2, 4, kind="bool"), t())),
    Case(aten.threshold.default, (X, 0.2, -1.0)),
    Case(aten.gelu.default, (X,), {"approximate": "tanh"}),
    Case(aten.leaky_relu.default, (X, 0.3)),
    Case(aten.prelu.default, (X, t(3))),
    Case(aten.prelu.default, (X, t(1))),
    Case(aten.prelu.default, (t(2, 3), t(3))),
    Case(aten.prelu.default, (t(4), t(1))),
    Case(aten.copy.default, (INTS, t(3, kind="integers", high=9))),
    Case(aten.copy.default, (INTS, t(kind="integers", high=9))),
    Case(aten.copy.default, (INTS, INTS)),
    Case(aten.fill.Scalar, (X, 2.0)),
    Case(aten.fill.Tensor, (X, t())),
    Case(aten.full_like.default, (X, 2.5)),
    Case(aten.zeros_like.default, (t(),), {"dtype": torch.int64}),
    Case(aten.type_as.default, (INTS, t(3))),
    Case(aten.to.other, (INTS, t(3))),
    Case(aten.to.dtype, (INTS, torch.float64)),
    Case(aten.to.dtype, (X, torch.float64, False, True, torch.channels_last)),
    Case(aten.to.dtype_layout, (INTS,), {"dtype": torch.float64}),
    Case(aten._to_copy.default, (INTS,), {"dtype": torch.float32}),
    Case(aten.clone.default, (X,), {"memory_format": torch.channels_last}),
    Case(aten.contiguous.default, (X,), {"memory_format": torch.channels_last}),
    Case(aten.contiguous.default, (t(),)),
    Case(aten.frexp.Tensor, (t(2, 3),)),
    Case(aten.ldexp.Tensor, (t(2, 3), t(kind="integers", high=4))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pointwise(case: Case) -> None:
    check(case)


DTYPES = [torch.bool, torch.int32, torch.int64, torch.float32, torch.float64]


@pytest.mark.parametrize("layout", [Layout.SHARED, Layout.STACKED])
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("target", [aten.add.Tensor, aten.eq.Tensor, aten.div.Tensor, aten.where.self], ids=str)
def test_zero_dim_operands_rank_below_others(target: Any, shape: tuple[int, ...], layout: Layout) -> None:
    for first in DTYPES:
        for second in DTYPES:
            x = (torch.rand(4, *shape) * 3).to(first)
            y = torch.rand(4).mul(3).to(second)
            mask = [torch.rand(4, *shape) < 0.5] if target is aten.where.self else []
            rows = [[*(m[b] for m in mask), x[0] if layout is Layout.SHARED else x[b], y[b]] for b in range(4)]
            expected = torch.stack([target(*row) for row in rows])
            drawn = [Draw(()) for _ in rows[0]]
            layouts = [*(Layout.STACKED for _ in mask), layout, Layout.STACKED]
            module = batch(member_graph(Case(target, tuple(drawn)), rows[0]), layouts, 4)
            (output,) = module(*mask, x[0] if layout is Layout.SHARED else x, y)
            torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)


def test_every_tagged_operator_has_a_rule() -> None:
    """Pointwise operators have a rule, unless they are random or do not return one tensor."""
    missing = []
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        target = getattr(getattr(aten, base, None), overload or "default", None)
        if target is None or torch.Tag.pointwise not in target.tags or target._schema.is_mutable:
            continue
        if target not in RULES and not base.startswith("_"):
            missing.append(str(target))
    assert set(missing) <= {
        "aten.equal.default",
        "aten.frexp.Tensor",
        "aten.ldexp.Tensor",
        "aten.rrelu.default",
    }


@pytest.mark.parametrize("layout", [Layout.STACKED, Layout.PACKED, Layout.LISTED])
def test_copy_has_a_derivative(layout: Layout) -> None:
    """``aten.copy`` itself has none, so the oracle's loop cannot tell."""
    case = Case(aten.copy.default, (t(2, 3), t(2, 3)))
    x, src = (torch.randn(2, 2, 3, requires_grad=True) for _ in range(2))
    convert = CONVERSIONS.get((Layout.STACKED, layout), lambda value, members: value)
    module = batch(member_graph(case, [x[0].detach(), src[0].detach()]), [layout, layout], 2)
    (output,) = module(convert(x, 2), convert(src, 2))
    output.backward(weight := torch.randn(2, 2, 3))
    assert torch.equal(output, src)
    assert torch.equal(src.grad, weight)
    assert not x.grad.any()

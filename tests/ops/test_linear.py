from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.layout import CONVERSIONS, Layout
from hfusion.core.member_random import recording
from hfusion.ops import attention, linear
from hfusion.ops.pointwise import RULES
from hfusion.passes.batch import batch
from tests.oracle import Case, Draw, check, member_graph, t

aten = torch.ops.aten

CASES = [
    # Without elements, no size can be inferred.
    Case(aten.matmul.default, (t(5, 2, 0), t(0, 3)), members=(1, 3)),
    Case(aten.matmul.default, (t(2, 0, 3), t(3, 4)), members=(2,)),
    Case(aten.linear.default, (t(2, 0, 4), t(5, 4), t(5)), members=(2,)),
    Case(aten.linear.default, (t(3, 4), t(5, 4), t(5))),
    Case(aten.linear.default, (t(3, 4), t(5, 4))),
    Case(aten.linear.default, (t(4), t(5, 4), t(5))),
    Case(aten.linear.default, (t(4), t(5, 4))),
    Case(aten.linear.default, (t(2, 3, 4), t(5, 4), t(5))),
    Case(aten.linear.default, (t(2, 3, 2, 4), t(5, 4))),
    Case(aten.linear.default, (t(3, 1), t(5, 1), t(5))),
    Case(aten.linear.default, (t(0, 4), t(5, 4), t(5))),
    Case(aten.linear.default, (t(3, 4), t(4))),
    # torch broadcasts a bias of another shape.
    *(Case(aten.linear.default, (t(3, 4), t(5, 4), t(*shape))) for shape in ((), (1,), (1, 5), (3, 5))),
    Case(aten.mm.default, (t(3, 4), t(4, 5))),
    Case(aten.bmm.default, (t(2, 3, 4), t(2, 4, 5))),
    Case(aten.mv.default, (t(3, 4), t(4))),
    Case(aten.dot.default, (t(4), t(4))),
    Case(aten.outer.default, (t(3), t(4))),
    *(
        Case(aten.matmul.default, (t(*a), t(*b)))
        for a in ((4,), (3, 4), (2, 3, 4), (2, 1, 3, 4))
        for b in ((4,), (4, 5), (2, 4, 5), (2, 2, 4, 5))
    ),
    Case(aten.addmm.default, (t(3, 5), t(3, 4), t(4, 5)), {"beta": 0.5, "alpha": 2}),
    Case(aten.addmm.default, (t(5), t(3, 4), t(4, 5))),
    Case(aten.addmm.default, (t(3, 1), t(3, 4), t(4, 5))),
    Case(aten.addmv.default, (t(3), t(3, 4), t(4)), {"beta": 0.5, "alpha": 2}),
    Case(aten.addmv.default, (t(1), t(3, 4), t(4))),
    Case(aten.baddbmm.default, (t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)), {"beta": 0.5, "alpha": 2}),
    Case(aten.baddbmm.default, (t(3, 1), t(2, 3, 4), t(2, 4, 5))),
    Case(aten.bilinear.default, (t(3, 4), t(3, 2), t(5, 4, 2), t(5))),
    Case(aten.bilinear.default, (t(2, 3, 4), t(2, 3, 2), t(5, 4, 2))),
    Case(aten.bilinear.default, (t(4), t(2), t(5, 4, 2), t(5))),
    Case(aten.einsum.default, ("ij,jk->ik", [t(3, 4), t(4, 5)])),
    Case(aten.einsum.default, ("bq, bk", [t(2, 4), t(2, 5)])),
    Case(aten.einsum.default, ("b...i,oi->b...o", [t(2, 3, 4), t(5, 4)])),
    Case(aten.einsum.default, ("...ij,...j", [t(2, 3, 4), t(4)])),
    Case(aten.einsum.default, ("ii->i", [t(3, 3)])),
    Case(aten.einsum.default, ("i,i->", [t(3), t(3)])),
    Case(aten.einsum.default, ("zij,zjk,zkl->zil", [t(2, 3, 4), t(2, 4, 5), t(2, 5, 2)])),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_with_its_own_backward(shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "OWN_BACKWARD_NUMEL", 0)
    check(Case(aten.linear.default, (t(*shape), t(5, 4), *([t(5)] if bias else []))))


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_second_derivatives_of_the_own_backward() -> None:
    operands = (leaf(2, 3, 4), leaf(2, 5, 4), leaf(2, 5))
    assert torch.autograd.gradgradcheck(linear.TokenMajor.apply, operands)


def test_gradients_of_complex_operands_by_the_own_backward() -> None:
    operands = [torch.randn(s, dtype=torch.complex128, requires_grad=True) for s in ((2, 3, 4), (2, 5, 4), (2, 5))]
    assert torch.autograd.gradcheck(linear.TokenMajor.apply, operands)


def test_autocast_reaches_the_products() -> None:
    x, weight = torch.randn(2, 3, 200), torch.randn(2, 200, 200, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear.linear_stacked(x, weight, None)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32


@pytest.mark.parametrize("norm", [1e-3, 0.04, 0.3, 1.0, 4.0])
def test_exponentials_of_matrices_are_the_members_to_the_bit(norm: float) -> None:
    """Torch takes another approximation for a batch of matrices than for one."""

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            drawn = torch.randn(6, 6, dtype=torch.float64).tril(-1)
            self.w = nn.Parameter((drawn - drawn.mT) * (norm / drawn.abs().sum()))

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.matrix_exp(self.w)

    models = [Turning() for _ in range(3)]
    actual = hf.fuse(models)(torch.eye(6, dtype=torch.float64))
    assert torch.equal(actual, torch.stack([torch.matrix_exp(model.w) for model in models]))


# Of operators that are called by themselves, torch's warnings reach Python from 2.15 on.
pytestmark = pytest.mark.filterwarnings("ignore:Dropout mask should only be used for testing purposes:UserWarning")
SDPA = aten.scaled_dot_product_attention.default

Q, K, V = t(2, 2, 3, 4), t(2, 2, 5, 4), t(2, 2, 5, 6)
FEW = (1, 3)

ATTENTION = [
    Case(SDPA, (Q, K, V)),
    Case(SDPA, (Q, K, V, None, 0.0, True), members=FEW),
    Case(SDPA, (Q, K, V), {"scale": 0.3}, members=FEW),
    Case(SDPA, (Q, K, V, t(3, 5, kind="bool")), members=FEW),
    Case(SDPA, (Q, K, V, t(2, 1, 3, 5, kind="bool")), members=FEW),
    Case(SDPA, (Q, K, V, t(1, 2, 1, 5)), members=FEW),
    Case(SDPA, (Q, K, V, t(2, 3, 5)), members=FEW),
    Case(SDPA, (t(2, 4, 3, 4), K, V), {"enable_gqa": True}, members=FEW),
    Case(SDPA, (t(1, 2, 3, 4), K, V), members=FEW),
    Case(SDPA, (t(2, 3, 4), t(2, 5, 4), t(2, 5, 6)), members=FEW),
    Case(SDPA, (t(2, 3, 4), t(2, 5, 4), t(2, 5, 6), t(2, 3, 5)), members=FEW),
    Case(SDPA, (t(3, 4), t(5, 4), t(5, 6), None, 0.0, True), members=FEW),
]


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(case: Case) -> None:
    check(case)


def dropped(p: float, mask: Any, causal: bool, gqa: bool) -> Case:
    query = t(2, 4, 3, 4) if gqa else Q
    return Case(SDPA, (query, K, V, mask, p, causal), {"enable_gqa": gqa})


@pytest.mark.parametrize(
    "case",
    [
        dropped(0.5, None, False, False),
        dropped(0.5, None, True, False),
        dropped(0.5, t(2, 1, 3, 5, kind="bool"), False, False),
        dropped(0.5, t(3, 5), False, True),
        dropped(1.0, None, False, False),
    ],
    ids=str,
)
def test_each_member_drops_its_own_weights(case: Case) -> None:
    """torch's own written-out attention takes the mask; it keeps by it and rescales."""
    members = 3
    rows = [
        [d.sample(torch.Generator().manual_seed(k)) for k in range(members)]
        for d in (a for a in case.args if hasattr(a, "sample"))
    ]
    module = batch(member_graph(case, [row[0] for row in rows]), [Layout.STACKED] * len(rows), members)
    lowerings = [node.meta["lowering"].text for node in module.graph.nodes if node.op == "call_function"]
    assert any("written out" in text for text in lowerings)
    with recording() as draws:
        (output,) = module(*(torch.stack(row) for row in rows))
    p, causal = case.args[4], case.args[5]
    if p == 1.0:
        assert not draws
        assert not output.any()
        return
    (noise,) = draws
    assert not torch.equal(noise[0], noise[1])
    for b in range(members):
        operands = [row[b] for row in rows]
        if operands[-1].dtype is torch.bool:
            operands[-1] = torch.zeros(operands[-1].shape).double().masked_fill(~operands[-1], -torch.inf)
        expected, _ = aten._scaled_dot_product_attention_math(
            *operands, *([None] * (4 - len(operands))), p, causal, noise[b].bool(), **case.kwargs
        )
        torch.testing.assert_close(output[b], expected, rtol=1e-9, atol=1e-12)


def test_a_query_that_may_attend_to_nothing_gets_zero() -> None:
    q, k, v = (torch.randn(2, 1, 1, 3, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(3, 3, dtype=torch.bool).tril(-1)
    torch.testing.assert_close(
        torch.matmul(attention.attention_weights(q, k, mask, False, None), v),
        F.scaled_dot_product_attention(q, k, v, mask),
    )


@pytest.mark.parametrize("p", [0.5, (0.5, 0.5, 0.2), (1.0, 0.3, 0.0)], ids=str)
def test_torchs_kernel_drops_each_members_weights(p: Any) -> None:
    """If all values are ones, each result is the sum of the kept weights, divided by the keep rate."""
    q, k = (torch.randn(3, 2, 2, 64, 8, dtype=torch.float64) for _ in range(2))
    y = attention.attend_dropping(p, q, k, torch.ones_like(k), None, False, None, False)
    rates = [p] * 3 if isinstance(p, float) else p
    for row, rate in zip(y, rates, strict=True):
        torch.testing.assert_close(row.mean(), torch.tensor(0.0 if rate == 1 else 1.0).double(), rtol=0, atol=0.05)
        assert bool(row.std() > 0.01) is (0 < rate < 1)
    assert not torch.equal(y[0], y[1])


X = t(2, 3, 2, 4)
POSITIVE = t(2, 3, kind="positive")
UNIT = t(2, 3, kind="unit")
INTS = t(2, 3, kind="integers", high=5)

# Shapes that meet x [N, C, H, W].
PARTNERS = [X, t(3, 1, 1), t(1, 3, 1, 1), t(2, 1, 1, 1), t(), t(2, 4), t(1), t(3, 2, 4), t(1, 1, 1, 1), t(2, 1, 2, 4)]

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


POINTWISE = [
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


@pytest.mark.parametrize("case", POINTWISE, ids=str)
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
    assert set(missing) <= {"aten.equal.default", "aten.frexp.Tensor", "aten.ldexp.Tensor", "aten.rrelu.default"}


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

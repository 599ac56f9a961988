from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.layout import CONVERSIONS, Layout
from hfusion.core.member_random import recording
from hfusion.ops.random import SELU_LIMIT
from hfusion.ops.rule import MemberScalars
from hfusion.passes.batch import batch
from tests.oracle import Case, check, member_graph, t

aten = torch.ops.aten

MEMBERS = 3
SHAPE = (4, 2, 3, 3)
DROPOUTS = [
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
]


def graph_of(target: OpOverload, args: tuple[Any, ...], operands: list[Tensor], **kwargs: Any) -> fx.Graph:
    return member_graph(Case(target, args, kwargs), operands)


def arranged(x: Tensor, layout: Layout) -> Any:
    if layout is Layout.SHARED:
        return x[0]
    return x if layout is Layout.STACKED else CONVERSIONS[Layout.STACKED, layout](x, MEMBERS)


def with_noise(target: OpOverload, x: Tensor, noise: Tensor, p: float) -> Tensor:
    """Compute torch's eager dropout from its draw of zeros and ones."""
    if "alpha" not in target.name():
        return x * (noise / (1 - p))
    a = 1 / ((SELU_LIMIT**2 * p + 1) * (1 - p)) ** 0.5
    return x * (noise * a) + ((noise - 1) * SELU_LIMIT * a + SELU_LIMIT * a * p)


def run(graph: fx.Graph, layout: Layout, *operands: Tensor) -> tuple[Tensor, list[Tensor]]:
    module = batch(graph, [layout] * len(operands), MEMBERS)
    with recording() as draws:
        y, *_ = module(*(arranged(x, layout) for x in operands))
    return y, draws


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("target", DROPOUTS, ids=str)
def test_dropout_is_torchs_with_the_members_own_draw(target: OpOverload, layout: Layout) -> None:
    x = torch.randn(MEMBERS, *SHAPE, dtype=torch.float64)
    y, (noise,) = run(graph_of(target, (t(*SHAPE), 0.4, True), [x[0]]), layout, x)
    noise_shape = (*SHAPE[:2], 1, 1) if "feature" in target.name() else SHAPE
    assert noise.shape == (MEMBERS, *noise_shape)
    assert set(noise.unique().tolist()) == {0.0, 1.0}
    assert not torch.equal(noise[0], noise[1])
    for b in range(MEMBERS):
        member_input = x[0 if layout is Layout.SHARED else b]
        torch.testing.assert_close(y[b], with_noise(target, member_input, noise[b], 0.4), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("target", DROPOUTS, ids=str)
def test_every_member_has_its_own_probability(target: OpOverload, layout: Layout) -> None:
    p = (0.0, 0.5, 1.0)
    x = torch.randn(MEMBERS, *SHAPE, dtype=torch.float64)
    graph = graph_of(target, (t(*SHAPE), 0.5, True), [x[0]])
    call = next(node for node in graph.nodes if node.op == "call_function")
    call.meta["arguments"] = ((call.args[0], MemberScalars(p), True), {})
    y, (noise,) = run(graph, layout, x)
    rows = x[0].expand_as(x) if layout is Layout.SHARED else x
    torch.testing.assert_close(y[0], rows[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y[1], with_noise(target, rows[1], noise[1], 0.5), rtol=1e-12, atol=1e-12)
    assert noise[1].any()
    assert not noise[1].all()
    assert not y[2].any()


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("target", DROPOUTS, ids=str)
def test_dropping_all_or_nothing_draws_nothing(target: OpOverload, layout: Layout) -> None:
    x = torch.randn(MEMBERS, *SHAPE, dtype=torch.float64)
    rows = x[0].expand_as(x) if layout is Layout.SHARED else x
    for p, train, factor in ((1.0, True, 0), (0.0, True, 1), (0.5, False, 1)):
        y, draws = run(graph_of(target, (t(*SHAPE), p, train), [x[0]]), layout, x)
        assert not draws
        if layout is not Layout.SHARED or factor == 0:
            torch.testing.assert_close(y, rows * factor)


def test_native_dropout_gives_its_mask() -> None:
    x = torch.randn(MEMBERS, 4, 5, dtype=torch.float64)
    graph = graph_of(aten.native_dropout.default, (t(4, 5), 0.5, True), [x[0]])
    assert [node.target for node in graph.nodes].count(operator.getitem) == 2
    with recording() as draws:
        y, mask = batch(graph, [Layout.STACKED], MEMBERS)(x)
    torch.testing.assert_close(draws[0].bool(), mask)
    torch.testing.assert_close(y, x * mask * 2)


@pytest.mark.parametrize("layout", list(Layout))
def test_rrelu_draws_slopes(layout: Layout) -> None:
    x = torch.randn(MEMBERS, 4, 6, dtype=torch.float64)
    y, (slopes,) = run(graph_of(aten.rrelu.default, (t(4, 6), 0.1, 0.4, True), [x[0]]), layout, x)
    rows = x[0].expand_as(x) if layout is Layout.SHARED else x
    torch.testing.assert_close(y, rows * slopes)
    below = slopes[rows < 0]
    assert slopes[rows > 0].eq(1).all()
    assert below.ge(0.1).all()
    assert below.le(0.4).all()
    assert below.unique().numel() == below.numel()


def test_rrelu_in_evaluation() -> None:
    check(Case(aten.rrelu.default, (t(4, 6), 0.1, 0.4, False)))


ELEMENTWISE: list[tuple[OpOverload, tuple[Any, ...], Callable[[Tensor], Tensor]]] = [
    (aten.rand_like.default, (t(40, 20),), lambda x: torch.full_like(x, 0.5)),
    (aten.randn_like.default, (t(40, 20),), torch.zeros_like),
    (aten.randint_like.default, (t(40, 20), 3), torch.ones_like),
    (aten.bernoulli.default, (t(40, 20, kind="unit"),), torch.clone),
    (aten.bernoulli.p, (t(40, 20), 0.3), lambda x: torch.full_like(x, 0.3)),
    (aten.normal.Tensor_float, (t(40, 20), 1.0), torch.clone),
    (aten.normal_functional.default, (t(40, 20), 2.0, 1.0), lambda x: torch.full_like(x, 2)),
    (aten.uniform.default, (t(40, 20), 0.0, 4.0), lambda x: torch.full_like(x, 2)),
    (aten.exponential.default, (t(40, 20), 2.0), lambda x: torch.full_like(x, 0.5)),
    (aten.poisson.default, (t(40, 20, kind="positive"),), torch.clone),
]


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(
    ("target", "args", "mean"), ELEMENTWISE, ids=lambda v: str(v) if isinstance(v, OpOverload) else ""
)
def test_elementwise_draws(
    target: OpOverload, args: tuple[Any, ...], mean: Callable[[Tensor], Tensor], layout: Layout
) -> None:
    x = torch.stack([args[0].sample(torch.Generator().manual_seed(k)) for k in range(MEMBERS)])
    y, (draws,) = run(graph_of(target, args, [x[0]]), layout, x)
    torch.testing.assert_close(y, draws)
    assert not torch.equal(y[0], y[1])
    rows = x[0].expand_as(x) if layout is Layout.SHARED else x
    torch.testing.assert_close((y - mean(rows)).mean((1, 2)), torch.zeros(MEMBERS).double(), atol=0.25, rtol=0)


FACTORIES: list[tuple[OpOverload, tuple[Any, ...]]] = [
    (aten.rand.default, ([7, 5],)),
    (aten.randn.default, ([7, 5],)),
    (aten.randint.default, (100, [7, 5])),
    (aten.randint.low, (10, 100, [7, 5])),
    (aten.normal.float_float, (0.0, 1.0, [7, 5])),
    (aten.randperm.default, (20,)),
]


@pytest.mark.parametrize(("target", "args"), FACTORIES, ids=lambda v: str(v))
def test_draws_of_a_given_shape(target: OpOverload, args: tuple[Any, ...]) -> None:
    y, (draws,) = run(graph_of(target, args, []), Layout.SHARED)
    assert y.shape == (MEMBERS, *target(*args).shape)
    assert y.dtype is target(*args).dtype
    torch.testing.assert_close(y, draws)
    assert not torch.equal(y[0], y[1])


@pytest.mark.parametrize("shape", [(6,), (4, 6)], ids=str)
def test_multinomial(shape: tuple[int, ...]) -> None:
    weights = torch.zeros(MEMBERS, *shape, dtype=torch.float64)
    weights[0, ..., :2] = 1
    weights[1:, ..., 3:5] = 1
    y, _ = run(graph_of(aten.multinomial.default, (t(*shape), 2), [weights[0]]), Layout.STACKED, weights)
    assert y.shape == (MEMBERS, *shape[:-1], 2)
    assert y[0].sort(-1).values.eq(torch.tensor([0, 1])).all()
    assert y[1:].sort(-1).values.eq(torch.tensor([3, 4])).all()

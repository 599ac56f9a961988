from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hfusion.core.layout import Layout
from hfusion.core.member_random import recording, seeded
from hfusion.ops import attention
from hfusion.passes.batch import batch
from tests.oracle import Case, check, member_graph, t

aten = torch.ops.aten
# Of operators that are called by themselves, torch's warnings reach Python from 2.15 on.
pytestmark = pytest.mark.filterwarnings("ignore:Dropout mask should only be used for testing purposes:UserWarning")
SDPA = aten.scaled_dot_product_attention.default

Q, K, V = t(2, 2, 3, 4), t(2, 2, 5, 4), t(2, 2, 5, 6)
FEW = (1, 3)

CASES = [
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case: Case) -> None:
    check(case)


def dropped(p: float, mask: Any, causal: bool, gqa: bool) -> Case:
    query = t(2, 4, 3, 4) if gqa else Q
    return Case(SDPA, (query, K, V, mask, p, causal), {"enable_gqa": gqa})


@pytest.fixture(params=["written out", "by blocks"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "by blocks":
        # Two queries of three members, two samples, two heads and five keys.
        monkeypatch.setattr(attention, "BLOCK_BYTES", 2 * 3 * 2 * 2 * 5 * 8)
        monkeypatch.setattr(attention, "KEPT_BYTES", 0)
    return str(request.param)


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
def test_each_member_drops_its_own_weights(case: Case, form: str) -> None:
    """torch's own written-out attention takes the mask; it keeps by it and rescales."""
    members = 3
    rows = [
        [d.sample(torch.Generator().manual_seed(k)) for k in range(members)]
        for d in (a for a in case.args if hasattr(a, "sample"))
    ]
    module = batch(member_graph(case, [row[0] for row in rows]), [Layout.STACKED] * len(rows), members)
    lowerings = [node.meta["lowering"].text for node in module.graph.nodes if node.op == "call_function"]
    assert any(form in text for text in lowerings)
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


def outcome(form: Any, inputs: list[torch.Tensor], p: Any, causal: bool, gqa: bool) -> list[torch.Tensor]:
    """The result with gradients of first and second order, all by the same seeds."""
    trained = [x for x in inputs if x.requires_grad]
    mask = inputs[3] if len(inputs) > 3 else None
    with seeded(torch.tensor([5, 6, 7])):
        y = form(p, 3, *inputs[:3], mask, causal, 0.7, gqa)
    weights = torch.linspace(0.1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    first = torch.autograd.grad((y * weights).sum(), trained, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), trained)
    plain = form_gradients(form, inputs, p, causal, gqa, weights)
    return [y, *first, *second, *plain]


def form_gradients(form: Any, inputs: list[Any], p: Any, causal: bool, gqa: bool, weights: Any) -> Any:
    with seeded(torch.tensor([5, 6, 7])):
        y = form(p, 3, *inputs[:3], inputs[3] if len(inputs) > 3 else None, causal, 0.7, gqa)
    return torch.autograd.grad((y * weights).sum(), [x for x in inputs if x.requires_grad])


@pytest.mark.parametrize("p", [0.4, (0.2, 0.5, 0.9)], ids=["one p", "own p"])
@pytest.mark.parametrize(
    ("mask", "causal", "gqa"),
    [
        (None, False, False),
        (None, True, False),
        (t(3, 2, 1, 3, 5, kind="bool"), False, False),
        (t(3, 1, 2, 3, 5), False, False),
        (t(3, 1, 1, 1, 5), False, True),
        (t(5), False, False),
    ],
    ids=str,
)
def test_blocks_of_queries_give_what_all_give_together(
    mask: Any, causal: bool, gqa: bool, p: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    draws = [t(3, 2, 4 if gqa else 2, 3, 4), t(3, 2, 2, 5, 4), t(3, 2, 2, 5, 6), *([] if mask is None else [mask])]
    inputs = [draw.sample(generator) for draw in draws]
    inputs = [x.requires_grad_(x.is_floating_point()) for x in inputs]
    expected = outcome(attention.attend_with_dropout, inputs, p, causal, gqa)
    monkeypatch.setattr(attention, "BLOCK_BYTES", 1)
    actual = outcome(attention.attend_by_blocks, inputs, p, causal, gqa)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_blocks_draw_the_same_in_backward_by_torchs_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_BYTES", 1)
    q, k, v = (torch.randn(3, 2, 2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with recording() as draws:
        y = attention.attend_by_blocks(0.5, 3, q, k, v, None, True, None, False)
    weights = torch.randn_like(y)
    grads = torch.autograd.grad((y * weights).sum(), (q, k, v))
    (noise,) = draws
    assert 0.3 < float(noise.mean()) < 0.7
    # Each query, which is a block here, has numbers of its own.
    assert len(noise.flatten(0, 2).movedim(1, 0).flatten(1).unique(dim=0)) == 7
    expected = torch.matmul(attention.attention_weights(q, k, None, True, None) * noise * 2, v)
    torch.testing.assert_close(y, expected)
    for a, b in zip(grads, torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


def test_backward_of_blocks_keeps_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_BYTES", 1 << 12)
    q = torch.randn(2, 1, 1, 64, 8, requires_grad=True)
    saved_sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved_sizes.append(x.numel()) or x, lambda x: x):
        attention.attend_by_blocks(0.5, 2, q, q * 2, q * 3, None, False, None, False)
    assert max(saved_sizes) == q.numel()


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

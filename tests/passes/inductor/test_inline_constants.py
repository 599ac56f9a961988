from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hfusion.passes.inductor.inline_constants import MAX_ELEMENTS, inline_constants


@pytest.mark.parametrize(
    "held",
    [
        torch.tensor([0.1, -0.0, float("inf"), float("nan")]),
        torch.rand(2, 3, 1, dtype=torch.float64),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.tensor([(1 << 62) + 1, -5]),
    ],
    ids=["not finite", "float64", "scalar", "bool", "large integers"],
)
def test_small_tensors_are_written_out(held: Tensor) -> None:
    module = make_fx(lambda x: (x + held.clone(), held.clone()))(torch.zeros(held.shape, dtype=held.dtype))
    inlined = inline_constants(module)
    assert not [node for node in inlined.graph.nodes if node.op == "get_attr"]
    x = torch.zeros(held.shape, dtype=held.dtype)
    for actual, expected in zip(inlined(x), module(x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(actual), torch.signbit(expected))


@pytest.mark.parametrize(
    "held",
    [torch.zeros(MAX_ELEMENTS + 1), torch.zeros(0), torch.zeros(2, dtype=torch.cfloat)],
    ids=["large", "empty", "complex"],
)
def test_others_stay(held: Tensor) -> None:
    module = make_fx(lambda x: x + held.clone())(torch.zeros(held.shape, dtype=held.dtype))
    inlined = inline_constants(module)
    assert [node.op for node in inlined.graph.nodes].count("get_attr") == [n.op for n in module.graph.nodes].count(
        "get_attr"
    )

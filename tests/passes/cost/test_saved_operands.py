"""Which operands autograd keeps for the backward of a product."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from hfusion.core.layout import Layout
from hfusion.ops.lowering import Lowering
from hfusion.ops.saved import FACTORS
from hfusion.passes.cost.cost import saves


@pytest.mark.parametrize(
    ("with_gradients", "saved"),
    [
        ({"x", "weight"}, ["x", "weight"]),
        # A frozen weight is needed for the gradient of the input, and a frozen input for that of the weight.
        ({"x"}, ["weight"]),
        ({"weight"}, ["x"]),
        (set(), []),
    ],
)
def test_a_factor_is_kept_where_the_other_one_has_a_gradient(with_gradients: set[str], saved: list[str]) -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    product = graph.call_function(torch.matmul, (x, weight))
    product.meta["lowering"] = Lowering(torch.matmul, Layout.STACKED, "bmm", saves=FACTORS)
    tracked = {node for node in (x, weight) if node.name in with_gradients} | ({product} if with_gradients else set())
    assert [node.name for node in saves(product, tracked)] == saved

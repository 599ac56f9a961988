"""Products that are read transposed are computed so, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hfusion.passes.inductor.transpose_products import transpose_products

aten = torch.ops.aten
A, B = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(3, 5, 2, dtype=torch.float64)
C = torch.randn(3, 2, 4, dtype=torch.float64)


def traced(fn: Callable[..., Tensor]) -> fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(A, B, C)


def count(module: fx.GraphModule, *targets: object) -> int:
    return sum(node.target in targets for node in module.graph.nodes)


TURNED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "copied": lambda a, b, c: torch.bmm(a, b).transpose(1, 2).contiguous(),
    "of a transposed": lambda a, b, c: torch.bmm(c.transpose(1, 2), b.transpose(1, 2)).transpose(1, 2).contiguous(),
    "of matrices": lambda a, b, c: torch.mm(a[0], b[0]).t().contiguous(),
    "added": lambda a, b, c: c + torch.bmm(a, b).transpose(-1, -2),
    "added twice": lambda a, b, c: (c + (turned := torch.bmm(a, b).transpose(-1, -2))) * turned,
}
LEFT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "in order": lambda a, b, c: torch.bmm(a, b) + 1,
    "of who uses it both ways": lambda a, b, c: (p := torch.bmm(a, b)).transpose(1, 2).contiguous() + p.sum(),
    "viewed both ways": lambda a, b, c: (v := torch.bmm(a, b).transpose(1, 2)).contiguous() + v.sum(0),
    "in memory as it is": lambda a, b, c: torch.bmm(a, b).transpose(1, 2).relu(),
    "multiplied": lambda a, b, c: torch.bmm(torch.bmm(a, b).transpose(1, 2), a),
    "other dims": lambda a, b, c: torch.bmm(a, b).transpose(0, 1).contiguous(),
    "given": lambda a, b, c: torch.bmm(a, b).transpose(1, 2),
}


@pytest.mark.parametrize("name", TURNED)
def test_products_that_are_read_transposed_are_computed_transposed(name: str) -> None:
    module = traced(TURNED[name])
    transposed = transpose_products(module)
    assert count(transposed, aten.clone.default) == 0
    torch.testing.assert_close(transposed(A, B, C), TURNED[name](A, B, C), rtol=1e-12, atol=1e-12)
    (product,) = (n for n in transposed.graph.nodes if n.target in (aten.bmm.default, aten.mm.default))
    assert product.meta["val"].is_contiguous()
    assert product.meta["val"].shape[-1] == 4
    for node in transposed.graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.meta["val"], Tensor)


@pytest.mark.parametrize("name", LEFT)
def test_other_products_are_unchanged(name: str) -> None:
    module = traced(LEFT[name])
    transposed = transpose_products(module)
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert [node.target for node in transposed.graph.nodes if node.op == "call_function"] == targets
    assert torch.equal(transposed(A, B, C), LEFT[name](A, B, C))

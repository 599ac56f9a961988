"""The rewriting itself: what is shared stays shared, transitions are made once, outputs are stacked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from hfusion.capture.export import capture
from hfusion.core.errors import FusionError
from hfusion.core.layout import Layout
from hfusion.core.program import Kind
from hfusion.passes.batch import batch


class Mixed(nn.Module):
    """A part that depends on the input alone, and parts that meet the member's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        table = x.cos().cumsum(0)
        return table * self.weight, table.sum() + self.weight


def batched(module: nn.Module, x: Tensor, stacked: bool) -> fx.GraphModule:
    captured = capture(module, (x,), {})
    kinds = {Kind.PARAMETER: Layout.STACKED, Kind.INPUT: Layout.STACKED if stacked else Layout.SHARED}
    return batch(captured.graph, [kinds[slot.kind] for slot in captured.slots], 3)


def test_values_that_depend_on_shared_inputs_are_computed_once() -> None:
    x = torch.randn(5, 4, dtype=torch.float64)
    module = Mixed()
    program = batched(module, x, stacked=False)
    layouts = {str(n.meta["origin"].target): n.meta["layout"] for n in program.graph.nodes if "origin" in n.meta}
    assert layouts["aten.cos.default"] is layouts["aten.cumsum.default"] is Layout.SHARED
    weights = torch.randn(3, 4, dtype=torch.float64)
    for output, b in [(program(weights, x), b) for b in range(3)]:
        module.weight.data.copy_(weights[b])
        for actual, expected in zip(output, module(x), strict=True):
            torch.testing.assert_close(actual[b], expected, rtol=1e-12, atol=1e-12)


def test_every_node_has_its_layout_lowering_and_origin() -> None:
    program = batched(Mixed(), torch.randn(5, 4, dtype=torch.float64), stacked=True)
    for node in program.graph.nodes:
        if node.op != "output":
            assert isinstance(node.meta["layout"], Layout)
            if node.op == "call_function":
                assert node.meta["lowering"].fn is node.target
                assert node.meta["lowering"].layout is node.meta["layout"]
            assert "origin" in node.meta or node.meta["transition"]


def test_a_transition_is_made_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.weight) * self.weight - self.weight

    program = batched(Twice(), torch.randn(5, 4), stacked=True)
    moved = [node.args[0] for node in program.graph.nodes if node.meta.get("transition")]
    assert len(moved) == len(set(moved))


def test_shared_outputs_are_stacked() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    (output,) = batched(Same(), torch.zeros(2, 4), stacked=False)(torch.zeros(2, 4))
    assert output.shape == (3, 2, 4)


@pytest.mark.parametrize("stacked", [False, True])
def test_sparse_results_are_refused(stacked: bool) -> None:
    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_sparse()

    with pytest.raises(FusionError, match="layout torch"):
        batched(Sparse(), torch.eye(3), stacked)

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hfusion.capture.export import capture
from hfusion.core.errors import FusionError
from hfusion.core.layout import CONVERSIONS, Layout
from hfusion.core.program import Kind
from hfusion.passes.batch import batch
from tests.oracle import RELATIVE, Case, check, draws, member_graph, t

aten = torch.ops.aten

X = t(2, 3, 4, 5)

CASES = [
    Case(aten.view.default, (X, [2, -1])),
    Case(aten.view.default, (X, [-1, 5])),
    Case(aten.view.default, (t(), [1, 1])),
    Case(aten.reshape.default, (X, [2, 6, 10])),
    Case(aten.reshape.default, (X, [-1])),
    Case(aten.reshape.default, (X, [-1, 12, 5])),
    Case(aten._unsafe_view.default, (t(6, 4), [2, 3, 4])),
    Case(aten.view_as.default, (t(6, 4), t(2, 12))),
    Case(aten.flatten.using_ints, (X, 1)),
    Case(aten.flatten.using_ints, (X, -2, -1)),
    Case(aten.flatten.using_ints, (X, 0, 1)),
    Case(aten.flatten.using_ints, (t(4), 0)),
    Case(aten.flatten.using_ints, (t(), 0)),
    Case(aten.ravel.default, (t(2, 3),)),
    Case(aten.unflatten.int, (t(2, 6, 4), 1, [2, 3])),
    Case(aten.unflatten.int, (t(2, 6, 4), 1, [-1, 3])),
    Case(aten.unflatten.int, (t(2, 6, 4), -1, [2, -1])),
    Case(aten.unflatten.int, (t(4, 6), 0, [2, 2])),
    Case(aten.permute.default, (X, [0, 2, 3, 1])),
    Case(aten.permute.default, (X, [0, 1, -1, -2])),
    Case(aten.permute.default, (t(3, 4), [1, 0])),
    Case(aten.transpose.int, (X, 1, 2)),
    Case(aten.transpose.int, (X, -1, -2)),
    Case(aten.transpose.int, (t(3, 4), 0, 1)),
    Case(aten.t.default, (t(3, 4),)),
    Case(aten.t.default, (t(3),)),
    Case(aten.numpy_T.default, (t(3, 4),)),
    Case(aten.mT.default, (t(2, 3, 4),)),
    Case(aten.movedim.int, (X, 1, -1)),
    Case(aten.movedim.intlist, (X, [2, 3], [3, 2])),
    Case(aten.swapaxes.default, (X, 0, -1)),
    Case(aten.unsqueeze.default, (X, 0)),
    Case(aten.unsqueeze.default, (X, -1)),
    Case(aten.unsqueeze.default, (t(3, 4), 1)),
    Case(aten.unsqueeze.default, (t(3, 4), 2)),
    Case(aten.unsqueeze.default, (t(), 0)),
    Case(aten.unsqueeze.default, (t(), -1)),
    Case(aten.squeeze.default, (t(1, 3, 1, 4),)),
    Case(aten.squeeze.default, (t(2, 3),)),
    Case(aten.squeeze.default, (t(1),)),
    Case(aten.squeeze.dim, (t(1, 3, 1, 4), 0)),
    Case(aten.squeeze.dim, (t(2, 1, 1), -1)),
    Case(aten.squeeze.dim, (t(2, 1, 4), 1)),
    Case(aten.squeeze.dim, (t(2, 3), 0)),
    Case(aten.squeeze.dims, (t(2, 3, 1, 1), [2, -1])),
    Case(aten.slice.Tensor, (X, 1, 0, 2)),
    Case(aten.slice.Tensor, (X, -1, 1, 9223372036854775807, 2)),
    Case(aten.slice.Tensor, (X, 0, 1)),
    Case(aten.slice.Tensor, (X, 1, 0, 9223372036854775807)),
    Case(aten.narrow.default, (X, 2, 1, 2)),
    Case(aten.select.int, (X, 1, -1)),
    Case(aten.select.int, (X, 2, 0)),
    Case(aten.select.int, (t(4), 0, 2)),
    Case(aten.split.Tensor, (X, 2, 2)),
    Case(aten.split.Tensor, (X, 2, 1)),
    Case(aten.split_with_sizes.default, (X, [1, 4], -1)),
    Case(aten.chunk.default, (X, 2, 0)),
    Case(aten.chunk.default, (X, 3, 1)),
    Case(aten.tensor_split.sections, (X, 3, 3)),
    Case(aten.tensor_split.indices, (t(5), [1, 3])),
    Case(aten.unbind.int, (X, 0)),
    Case(aten.unbind.int, (X, -2)),
    Case(aten.cat.default, ([t(2, 3, 4), t(2, 2, 4)], 1)),
    Case(aten.cat.default, ([t(2, 3, 4), t(2, 3, 1)], -1)),
    Case(aten.cat.default, ([t(3), t(2)],)),
    Case(aten.cat.default, ([t(0), t(2, 3)],)),
    Case(aten.stack.default, ([t(2, 3), t(2, 3)], -1)),
    Case(aten.stack.default, ([t(2, 3), t(2, 3)],)),
    Case(aten.stack.default, ([t(), t()],)),
    Case(aten.hstack.default, ([t(2, 3), t(2, 2)],)),
    Case(aten.hstack.default, ([t(3), t(2)],)),
    Case(aten.vstack.default, ([t(3), t(3)],)),
    Case(aten.vstack.default, ([t(1, 3), t(2, 3)],)),
    Case(aten.dstack.default, ([t(1, 3, 2), t(1, 3, 1)],)),
    Case(aten.column_stack.default, ([t(3), t(3, 2)],)),
    Case(aten.expand.default, (t(3, 1), [2, 3, 4])),
    Case(aten.expand.default, (t(1, 3, 1), [2, -1, 4])),
    Case(aten.expand.default, (t(2, 1, 1), [-1, 3, 1])),
    Case(aten.expand.default, (t(), [2])),
    Case(aten.broadcast_to.default, (t(3), [2, 3])),
    Case(aten.expand_as.default, (t(3, 1), t(2, 3, 4))),
    Case(aten.repeat.default, (t(2, 3), [2, 1, 2])),
    Case(aten.tile.default, (t(2, 3, 2), [2])),
    Case(aten.repeat_interleave.self_int, (t(2, 3), 2)),
    Case(aten.repeat_interleave.self_int, (t(2, 3, 2), 3, 1)),
    Case(aten.repeat_interleave.self_int, (t(2, 3, 2), 3, -1), {"output_size": 6}),
    Case(aten.roll.default, (X, [1], [1])),
    Case(aten.roll.default, (X, [1, -1], [2, -1])),
    Case(aten.roll.default, (t(2, 3), [1])),
    Case(aten.flip.default, (X, [0, -1])),
    Case(aten.flip.default, (X, [1])),
    Case(aten.fliplr.default, (t(2, 3),)),
    Case(aten.rot90.default, (t(2, 3, 4), 1, [0, 1])),
    Case(aten.tril.default, (t(3, 4), 1)),
    Case(aten.triu.default, (X, -1)),
    Case(aten.diagonal.default, (X, 0, -2, -1)),
    Case(aten.diagonal.default, (t(3, 3),)),
    Case(aten.diag_embed.default, (t(2, 3),)),
    Case(aten.diag_embed.default, (t(2, 3), 0, 0, 1)),
    Case(aten.unfold.default, (X, 3, 2, 2)),
    Case(aten.unfold.default, (X, 1, 2, 1)),
    Case(aten.slice_scatter.default, (X, t(2, 3, 2, 5), 2, 1, 3)),
    Case(aten.slice_scatter.default, (X, t(2, 1, 4, 5), 1, 0, 1)),
    Case(aten.select_scatter.default, (X, t(2, 3, 4), -1, 1)),
    Case(aten.select_scatter.default, (X, t(3, 4, 5), 0, 1)),
    Case(aten.diagonal_scatter.default, (t(3, 3), t(3))),
    Case(aten.glu.default, (t(2, 4, 6), -1)),
    Case(aten.glu.default, (t(2, 4, 6), 1)),
    Case(aten.new_zeros.default, (X, [2, 3])),
    Case(aten.new_full.default, (X, [2, 3], 1.5)),
    Case(aten.meshgrid.indexing, ([t(3), t(2)],), {"indexing": "ij"}),
    Case(aten.diff.default, (t(3, 4),)),
    Case(aten.atleast_2d.default, (t(3),)),
    Case(aten.pixel_shuffle.default, (t(2, 4, 3, 3), 2)),
    Case(aten.channel_shuffle.default, (t(2, 4, 3, 3), 2)),
    Case(aten.block_diag.default, ([t(2, 2), t(1, 3)],)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shape(case: Case) -> None:
    check(case)


PACKED = [
    (Case(aten.reshape.default, (X, [2, 6, 10])), True),
    (Case(aten.reshape.default, (X, [6, 20])), False),
    (Case(aten.flatten.using_ints, (X, 1)), True),
    (Case(aten.flatten.using_ints, (X, 0, 1)), False),
    (Case(aten.permute.default, (X, [0, 1, 3, 2])), True),
    (Case(aten.permute.default, (X, [0, 2, 3, 1])), False),
    (Case(aten.transpose.int, (X, -1, -2)), True),
    (Case(aten.transpose.int, (X, 1, 2)), False),
    (Case(aten.unsqueeze.default, (X, -1)), True),
    (Case(aten.slice.Tensor, (X, 1, 0, 2)), False),
    (Case(aten.slice.Tensor, (X, 2, 0, 2)), True),
    (Case(aten.select.int, (X, 0, 0)), False),
    (Case(aten.cat.default, ([X, X], 1)), True),
    (Case(aten.stack.default, ([X, X], 2)), True),
    (Case(aten.expand.default, (t(2, 3, 1), [2, 3, 4])), True),
    (Case(aten.expand.default, (t(2, 1, 1), [2, 3, 4])), False),
]


@pytest.mark.parametrize(("case", "stays"), PACKED, ids=str)
def test_packed_stays_packed_where_it_can(case: Case, stays: bool) -> None:
    drawn = draws(case.args)
    graph = member_graph(case, [torch.zeros(d.shape) for d in drawn])
    batched = batch(graph, [Layout.PACKED] * len(drawn), 2).graph
    (call,) = [n for n in batched.nodes if n.op == "call_function" and "origin" in n.meta]
    assert (call.meta["layout"] is Layout.PACKED) is stays


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_sizes_are_those_of_a_member(layout: Layout, dim: int) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2, 3, 4)
    size = graph.call_function(aten.sym_size.int, (x, dim))
    count = graph.call_function(aten.sym_numel.default, (x,))
    size.meta["val"], count.meta["val"] = (2, 3, 4)[dim], 24
    full = graph.call_function(aten.full.default, ([size, count], 1.0))
    full.meta["val"] = torch.zeros(size.meta["val"], 24)
    graph.output((full,))
    stacked = torch.zeros(5, 2, 3, 4)
    convert = CONVERSIONS.get((Layout.STACKED, layout), lambda value, _: value)
    (output,) = batch(graph, [layout], 5)(stacked[0] if layout is Layout.SHARED else convert(stacked, 5))
    assert output.shape == (5, (2, 3, 4)[dim], 24)


class Sizes(nn.Module):
    """Sizes that vary with the batch, and writes through views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        n, y = x.size(0), x @ self.weight
        heads = y.view(n, 2, -1).transpose(1, 2).contiguous().view(n, -1)
        folded = y.reshape(n * 3, 2).reshape(n, 6) + self.weight.sum().expand(n, 6)
        written = y.new_zeros(n, 6) + torch.zeros_like(y)
        written[:, 1:3] = y[:, :2]
        written[0] = 5.0
        written[:, 0] = y[:, 0]
        written.add_(1).mul_(y)
        masked = y.clone()
        masked[y > 0.5] = 0.0
        rows = y[torch.arange(n)] + y.repeat(2, 1)[:n] + torch.cat([y, x], 0).split(n, 0)[0].mean(1, keepdim=True)
        scalars = y.sum() / y.numel() + torch.narrow(y, 0, 0, n - 1).sum()
        return heads + folded + written + masked + rows + scalars


def test_sizes_computed_in_the_graph() -> None:
    members = [Sizes() for _ in range(3)]
    captured = capture(members[0], (torch.randn(4, 6, dtype=torch.float64),), {})
    layouts = [Layout.STACKED if slot.kind is Kind.PARAMETER else Layout.SHARED for slot in captured.slots]
    module = batch(captured.graph, layouts, 3)
    weight = torch.stack([member.weight for member in members])
    for n in (4, 7):
        x = torch.randn(n, 6, dtype=torch.float64)
        inputs = {Kind.PARAMETER: weight, Kind.INPUT: x}
        (output,) = module(*(inputs.get(s.kind, captured.constants.get(s.name)) for s in captured.slots))
        expected = torch.stack([member(x) for member in members])
        torch.testing.assert_close(output, expected, rtol=RELATIVE, atol=1e-11)
        leaves = [member.weight for member in members]
        actual_grads, expected_grads = (
            torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (output, expected)
        )
        torch.testing.assert_close(actual_grads, expected_grads, rtol=RELATIVE, atol=1e-11)


def test_a_stack_inside_a_larger_one_is_read_from_where_it_begins() -> None:
    graph = member_graph(Case(aten.as_strided.default, (t(3, 4), [2], [5], 1)), [torch.zeros(3, 4)])
    whole = torch.randn(5, 3, 4)
    (output,) = batch(graph, [Layout.STACKED], 2)(whole[2:4])
    assert torch.equal(output, torch.stack([row.clone().as_strided([2], [5], 1) for row in whole[2:4]]))


def test_writes_at_addresses_are_refused() -> None:
    case = Case(aten.as_strided_scatter.default, (t(3, 4), t(2), [2], [5]))
    with pytest.raises(FusionError, match="by index or by slices"):
        batch(member_graph(case, [torch.zeros(3, 4), torch.zeros(2)]), [Layout.STACKED, Layout.SHARED], 2)


def test_a_members_memory_is_read_as_it_lies() -> None:
    check(Case(aten.as_strided.default, (t(3, 4), [2, 3], [4, 1], 1)))
    graph = member_graph(Case(aten.as_strided.default, (t(3, 4), [2], [1])), [torch.zeros(4, 3).t()])
    with pytest.raises(FusionError, match="strides"):
        batch(graph, [Layout.STACKED], 2)

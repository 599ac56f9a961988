from __future__ import annotations

from typing import Any

import pytest
import torch

from hfusion.core.errors import FusionError
from hfusion.core.layout import Layout
from hfusion.passes.batch import batch
from tests.oracle import Case, Draw, check, member_graph, t

aten = torch.ops.aten
# Of operators that are called by themselves, torch's warnings reach Python from 2.15 on.
pytestmark = pytest.mark.filterwarnings("ignore:.*is non-contiguous, this will lower the performance:UserWarning")

X = t(3, 4, 5)


def ints(*shape: int, high: int = 3) -> Draw:
    return t(*shape, kind="integers", high=high)


CASES = [
    Case(aten.index.Tensor, (X, [ints(2)])),
    Case(aten.index.Tensor, (X, [ints()])),
    Case(aten.index.Tensor, (X, [ints(2, 3)])),
    Case(aten.index.Tensor, (X, [None, ints(2)])),
    Case(aten.index.Tensor, (X, [None, ints(2, 2), ints(2)])),
    Case(aten.index.Tensor, (X, [ints(2), ints(2, 1)])),
    Case(aten.index.Tensor, (X, [None, None, ints(2, 3)])),
    Case(aten.index.Tensor, (X, [ints(2), None, ints(2)])),
    Case(aten.index.Tensor, (t(2, 3, 4, 5), [None, ints(2), None, ints(3, 2)])),
    Case(aten.index.Tensor, (t(2, 3, 4, 5), [None, None, ints(3), ints(3)])),
    Case(aten.index.Tensor, (ints(6, high=9), [ints(2, 2)])),
    Case(aten.index_put.default, (X, [ints(2)], t(2, 4, 5))),
    Case(aten.index_put.default, (X, [ints(2)], t(5), True)),
    Case(aten.index_put.default, (X, [ints(2), ints(2)], t())),
    Case(aten.index_put.default, (X, [None, ints(2)], t(3, 2, 5), True)),
    Case(aten.index_put.default, (X, [None, ints(3), ints(3)], t(3, 3), True)),
    Case(aten.index_put.default, (X, [ints(2), None, ints(2)], t(2, 4), True)),
    Case(aten.index_put.default, (X, [t(3, 4, kind="bool")], t())),
    Case(aten.index_put.default, (X, [t(3, kind="bool")], t(), True)),
    Case(aten.index_put.default, (X, [t(3, 4, 5, kind="bool")], t())),
    Case(aten.index_put.default, (X, [None, t(4, kind="bool")], t())),
    Case(aten.index_put.default, (X, [t(3, kind="bool")], t(4, 5))),
    Case(aten.index_select.default, (X, 0, ints(4))),
    Case(aten.index_select.default, (X, 1, ints(2))),
    Case(aten.index_select.default, (X, -1, ints(2))),
    Case(aten.gather.default, (X, 1, ints(3, 2, 5))),
    Case(aten.gather.default, (X, -1, ints(2, 4, 1))),
    Case(aten.scatter.src, (X, 2, t(3, 4, 1, kind="integers", high=5), t(3, 4, 1))),
    Case(aten.scatter.value, (X, 0, ints(1, 4, 5), 1.5)),
    Case(aten.scatter_add.default, (X, 1, ints(3, 6, 5), t(3, 6, 5))),
    Case(aten.scatter_reduce.two, (X, 1, ints(3, 6, 5), t(3, 6, 5), "amax"), members=(2,)),
    Case(aten.index_add.default, (X, 1, ints(2), t(3, 2, 5)), {"alpha": 2.0}),
    Case(aten.index_add.default, (X, -1, ints(6), t(3, 4, 6))),
    Case(aten.index_copy.default, (X, 0, ints(1), t(1, 4, 5))),
    Case(aten.index_fill.int_Scalar, (X, 1, ints(2), 3.0)),
    Case(aten.index_fill.int_Tensor, (X, 1, ints(2), t())),
    Case(aten.take_along_dim.default, (X, ints(3, 2, 1), 1)),
    Case(aten.take_along_dim.default, (X, ints(2))),
    Case(aten.take.default, (X, ints(2, 2, high=9))),
    Case(aten.bucketize.Tensor, (X, Draw((4,), "unit"))),
    Case(aten.one_hot.default, (ints(2, 3), 3)),
    Case(aten.one_hot.default, (ints(), 3)),
    Case(aten.masked_scatter.default, (t(2, 3), t(2, 3, kind="bool"), t(2, 3))),
    Case(aten.searchsorted.Tensor, (ints(3, 4), ints(3, 2))),
    Case(aten.put.default, (X, ints(2, high=9), t(2), True)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_index(case: Case) -> None:
    check(case)


def with_layout(case: Case, layouts: list[Layout], rows: list[torch.Tensor]) -> Layout:
    graph = batch(member_graph(case, rows), layouts, 2).graph
    (node,) = [n for n in graph.nodes if n.op == "call_function" and "origin" in n.meta]
    layout: Layout = node.meta["layout"]
    return layout


def test_shared_rows_keep_packed() -> None:
    rows = [torch.zeros(3, 4, 5), torch.zeros(2, dtype=torch.int64)]
    assert with_layout(Case(aten.index.Tensor, (X, [ints(2)])), [Layout.PACKED, Layout.SHARED], rows) is Layout.PACKED
    case = Case(aten.index.Tensor, (X, [None, ints(2)]))
    assert with_layout(case, [Layout.PACKED, Layout.SHARED], rows) is Layout.STACKED


@pytest.mark.parametrize("layout", [Layout.STACKED, Layout.PACKED, Layout.LISTED])
@pytest.mark.parametrize("target", [aten.index.Tensor, aten.one_hot.default, aten.item.default], ids=str)
def test_value_dependent_shapes_are_refused(target: Any, layout: Layout) -> None:
    graph = torch.fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    x.meta["val"], mask.meta["val"] = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    args = (x, [mask]) if target is aten.index.Tensor else (x,)
    call = graph.call_function(target, args)
    call.meta["val"] = torch.zeros(4)
    graph.output((call,))
    with pytest.raises(FusionError, match="members"):
        batch(graph, [layout, layout], 2)

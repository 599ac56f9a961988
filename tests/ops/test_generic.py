from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hfusion.core.layout import Layout
from hfusion.ops.generic import vmapped
from hfusion.ops.rule import call_per_member
from hfusion.passes.batch import batch
from tests.oracle import Case, check, member_graph, t

aten = torch.ops.aten

CASES = [
    Case(aten.trace.default, (t(3, 4),)),
    Case(aten.masked_scatter.default, (t(2, 3), t(2, 3, kind="bool"), t(2, 3))),
    Case(aten.renorm.default, (t(3, 4), 2, 0, 1.0)),
    Case(aten.put.default, (t(3, 4), t(2, kind="integers", high=9), t(2), True)),
    Case(
        aten.gru.input,
        (t(2, 3, 4), t(1, 2, 5), [t(15, 4), t(15, 5), t(15), t(15)], True, 1, 0.0, True, False, True),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_generic(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("case", "function"), [(CASES[0], vmapped), (CASES[2], call_per_member)], ids=["vmap", "loop"])
def test_vmap_only_by_a_true_batching_rule(case: Case, function: Callable[..., Any]) -> None:
    graph = batch(member_graph(case, [torch.zeros(3, 4)]), [Layout.STACKED], 2).graph
    assert [n.target for n in graph.nodes if "origin" in n.meta and n.op == "call_function"] == [function]


def test_sizes_computed_in_the_graph_reach_vmap() -> None:
    graph = member_graph(Case(aten.narrow_copy.default, (t(3, 4), 1, 0, 2)), [torch.zeros(3, 4)])
    x, call = (n for n in graph.nodes if n.op != "output")
    with graph.inserting_before(call):
        size = graph.call_function(aten.sym_size.int, (x, 0))
        size.meta["val"] = 3
    call.args = (x, 1, 0, size)
    module = batch(graph, [Layout.STACKED], 2)
    assert vmapped in [n.target for n in module.graph.nodes]
    value = torch.randn(2, 3, 4)
    assert torch.equal(module(value)[0], value[:, :, :3])

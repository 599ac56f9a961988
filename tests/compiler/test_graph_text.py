"""Graphs written and read again."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
import torch
from torch import fx

import hfusion as hf
from hfusion.compiler.graph_text import Unwritable, read_graph, write_graph
from hfusion.core.layout import Layout
from hfusion.ops.rule import MemberScalars
from tests.zoo import MODELS, Model

ARGUMENTS = [
    [1, True, None, "text"],
    (0.1, -0.0, float("inf"), 1 + 2j),
    {"a": (1, [2])},
    slice(None, 3, 2),
    torch.float16,
    torch.contiguous_format,
    torch.strided,
    torch.device("cpu"),
    Layout.PACKED,
    MemberScalars((0.1, 0.2)),
    torch.ops.aten.add.Tensor,
]


def texts(graph: fx.Graph, root: fx.GraphModule | None = None) -> str:
    return json.dumps(write_graph(graph, root))


@pytest.mark.parametrize("argument", ARGUMENTS, ids=lambda a: type(a).__name__)
def test_arguments_come_back(argument: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(operator.getitem, (x, argument)))
    restored = read_graph(json.loads(texts(graph)))
    _, call, _ = restored.graph.nodes
    assert repr(call.args[1]) == repr(argument)
    assert texts(restored.graph) == texts(graph)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_programs_come_back(model: Model) -> None:
    """A restored graph computes the same bits: the members' graph, the program, and its code with gathered loops."""
    fused = hf.fuse([model.make().double() for _ in range(3)], verify=False)
    fused.eval()
    x = model.draw(4)
    fused(x)
    ((compiled,),) = fused._compiler.families.values()
    if compiled.opaque:
        return
    code = compiled.program.code
    for module in (compiled.program.module, code):
        restored = read_graph(json.loads(texts(module.graph, module)))
        assert texts(restored.graph, restored) == texts(module.graph, module)
    state = fused.state_dict() | compiled.constants

    def arguments() -> list[Any]:
        # A program may write to buffers.
        return [x if s.kind.value == "input" else state[s.name].clone() for s in compiled.program.slots]

    for value, expected in zip(restored(*arguments()), code(*arguments()), strict=True):
        assert torch.equal(value, expected)


NO_OPERATORS = {
    "lambda": lambda x: x,
    "another module": "os:system",
    "absent": "hfusion.core.errors:FusionError.missing",
}


@pytest.mark.parametrize("target", NO_OPERATORS.values(), ids=NO_OPERATORS)
def test_targets_that_are_no_operators_are_refused(target: Any) -> None:
    if callable(target):
        graph = fx.Graph()
        graph.output(graph.call_function(target, (graph.placeholder("x"),)))
        with pytest.raises(Unwritable, match="lambda"):
            write_graph(graph)
        return
    with pytest.raises((ValueError, AttributeError)):
        read_graph([["call_function", "call", target, {"tuple": []}, {"dict": []}, {}]])

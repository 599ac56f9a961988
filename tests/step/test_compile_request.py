"""A step as JSON: what is read of it is traced to the same graph."""

from __future__ import annotations

import json

import pytest
import torch

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.bound_program import BoundProgram
from hfusion.step.compile_request import read_request, write_request
from hfusion.step.step_graph import StepCall, StepGraph, trace
from tests.step.test_step_graph import TRACED, loss_of
from tests.zoo import Model


def described(graph: StepGraph) -> tuple[object, ...]:
    shapes = [[getattr(node.meta.get("val"), "dtype", None) for node in graph.module.graph.nodes]]
    batch = [[(list(map(str, fake.shape)), fake.stride()[-1:]) for fake in graph.array_tensors]]
    return str(graph.module.graph), graph.trained, graph.dims, shapes, batch


@pytest.mark.parametrize("model", TRACED, ids=str)
def test_it_is_traced_to_the_same_graph(model: Model) -> None:
    models = [model.make().double() for _ in range(3)]
    fused, loss = hf.fuse(models, verify=False), hf.per_model(loss_of)
    x, target = model.draw(4), torch.rand(4, dtype=torch.float64)
    outputs = fused(x)
    loss(outputs, target)
    call = StepCall(Arguments.of((x,), {}), Arguments.of((target,), {}))
    forward, its_loss = fused.find(call.inputs), loss.find_program(outputs, target)
    assert forward is not None
    assert isinstance(its_loss, BoundProgram)
    bound = BoundProgram.of(forward, fused)
    compile_request = write_request(bound, its_loss, call, None, None)
    with read_request(json.loads(compile_request.text)) as read:
        again = write_request(read.forward, read.loss, read.call, read.size, None)
        assert described(trace(read.forward, read.loss, read.call)) == described(trace(bound, its_loss, call))
        shapes = [*call.inputs.shapes]
        assert read.forward.compiled.guards(shapes)
        assert not read.forward.compiled.guards([(1, *shape[1:]) for shape in shapes])
    assert again.text == compile_request.text

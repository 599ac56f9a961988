"""A graph of one device runs on another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.passes.partition.split_program import retarget_device
from tests import zoo

META = torch.device("meta")


@pytest.mark.parametrize("name", ["recurrent", "encoder", "points"])
def test_every_call_runs_where_its_tensors_are(name: str) -> None:
    model = next(model for model in zoo.MODELS if model.name == name)
    array = hf.fuse([model.make().double() for _ in range(2)], verify=False)
    x = model.draw(3)
    expected = array(x)
    compiled = array.compiled(Arguments.of((x,), {}))
    code = compiled.program.code
    state = {**dict(array.named_parameters()), **dict(array.named_buffers()), **compiled.constants}
    inputs = [state.get(slot.name, x) for slot in compiled.program.slots]
    (output,) = retarget_device(code, META)(*(tensor.to(META) for tensor in inputs))
    assert isinstance(expected, Tensor)
    assert (output.device, output.shape) == (META, expected.shape)
    assert torch.equal(code(*inputs)[0], retarget_device(code, x.device)(*inputs)[0])


def test_a_graph_that_names_no_other_device_is_left_as_it_is() -> None:
    array = hf.fuse([torch.nn.Linear(2, 2) for _ in range(2)])
    code = array.compiled(Arguments.of((torch.rand(3, 2),), {})).program.code
    assert retarget_device(code, META) is code

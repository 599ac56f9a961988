"""torch.compile of a fused module: one graph without a break, the same values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf
from tests import zoo

MEMBERS = 3


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pair(make: Any) -> tuple[hf.FusedModule, hf.FusedModule]:
    """Two arrays of the same members."""
    torch.manual_seed(0)
    models = [make().double() for _ in range(MEMBERS)]
    return hf.fuse(models), hf.fuse(models, verify=False)


def leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def run(array: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
    torch.manual_seed(1)
    outputs = leaves(array(*args, **kwargs))
    torch.stack([output.sin().sum() for output in outputs]).sum().backward()
    return outputs


def assert_same(compiled: hf.FusedModule, eager: hf.FusedModule, outputs: list[Tensor], expected: list[Tensor]) -> None:
    state = eager.state_dict()
    grads = {name: param.grad for name, param in eager.named_parameters()}
    pairs = [
        *zip(outputs, expected, strict=True),
        *((tensor, state[name]) for name, tensor in compiled.state_dict().items()),
    ]
    for name, param in compiled.named_parameters():
        assert (param.grad is None) == (grads[name] is None)
        if param.grad is not None:
            pairs.append((param.grad, grads[name]))
    for actual, their in pairs:
        torch.testing.assert_close(actual, their, rtol=1e-9, atol=1e-12)


# "branching" runs the members' own code, with a branch on values.
TRACED = [model for model in zoo.MODELS if model.name != "branching"]


# To trace again takes as long as the first time: every other model is given another size, the others are evaluated.
@pytest.mark.parametrize(("model", "again"), list(zip(TRACED, cycle(["size", "eval"]))), ids=str)
def test_models_of_every_kind(model: zoo.Model, again: str) -> None:
    array, eager = pair(model.make)
    compiled = torch.compile(array, fullgraph=True, backend="aot_eager")
    for size in (4, 4, 3) if again == "size" else (4, 4):
        x = model.draw(size)
        assert_same(array, eager, run(compiled, x), run(eager, x))
    if again == "size":
        return
    array.eval(), eager.eval()
    x = hf.stacked([model.draw(4) for _ in range(MEMBERS)])
    assert_same(array, eager, run(compiled, x), run(eager, x))


def test_loading_and_conversion_are_seen() -> None:
    array, eager = pair(lambda: nn.Linear(4, 2))
    compiled = torch.compile(array, fullgraph=True, backend="aot_eager")
    x = torch.rand(5, 4, dtype=torch.float64)
    run(compiled, x)
    with torch.no_grad():
        eager.weight.mul_(2)
    array.load_state_dict(eager.state_dict())
    torch.testing.assert_close(compiled(x), eager(x))
    array.float(), eager.float()
    torch.testing.assert_close(compiled(x.float()), eager(x.float()))

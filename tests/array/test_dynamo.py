"""torch.compile of a fused module: one graph without a break, the same values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
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


def test_a_call_like_an_earlier_one_is_not_traced_again() -> None:
    array, _ = pair(lambda: nn.Linear(4, 2))
    counter = CompileCounter()
    compiled = torch.compile(array, fullgraph=True, backend=counter)
    x = torch.rand(5, 4, dtype=torch.float64)
    for _ in range(3):
        compiled(x)
        compiled(x + 1)
    assert counter.frame_count == 1
    compiled(hf.stacked([x] * MEMBERS))
    assert counter.frame_count == 2


class Named(nn.Module):
    """Arguments by name, a number among them, and a nest of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.register_buffer("scale", torch.rand(()))

    def forward(self, x: Tensor, *, shift: Tensor, times: int) -> dict[str, Any]:
        return {"sum": x * self.weight + shift, "pair": (self.scale * times, x - torch.tensor([1.0, 2.0, 3.0, 4.0]))}


def test_arguments_by_name_and_nests_of_outputs() -> None:
    array, eager = pair(Named)
    compiled = torch.compile(array, fullgraph=True, backend="aot_eager")
    x, shift = torch.rand(2, 4, dtype=torch.float64), hf.stacked(torch.rand(MEMBERS, 2, 4, dtype=torch.float64))
    kwargs: dict[str, Any] = {"shift": shift, "times": 3}
    outputs = compiled(x, **kwargs)
    assert pytree.tree_structure(outputs) == pytree.tree_structure(eager(x, **kwargs))
    assert_same(array, eager, run(compiled, x, **kwargs), run(eager, x, **kwargs))


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


def test_the_self_check_is_made() -> None:
    array, _ = pair(lambda: nn.Linear(4, 2))
    torch.compile(array, fullgraph=True, backend="aot_eager")(torch.rand(5, 4, dtype=torch.float64))
    assert "self-check passed" in str(array.report())


def test_penalties_and_modules_of_an_array_are_traced() -> None:
    """Checks of the caller do not stop Dynamo from tracing parameters() and named_modules()."""
    array, _ = pair(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    x = torch.randn(5, 4).double()

    def loss(x: Tensor) -> Any:
        penalty = sum(param.square().sum() for param in array.parameters())
        return array(x).square().sum() + penalty * len(list(array.named_modules()))

    torch.testing.assert_close(torch.compile(loss, fullgraph=True, backend="eager")(x), loss(x))

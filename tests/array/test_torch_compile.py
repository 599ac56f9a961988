"""torch.compile and torch.export of an array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf
from tests import zoo
from tests.alone import Branch, normal

# torch.compile of a fused module: one graph without a break, the same values and gradients.
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
    def results(array: hf.FusedModule, outputs: list[Tensor]) -> list[Any]:
        return [outputs, dict(array.state_dict()), {name: param.grad for name, param in array.named_parameters()}]

    torch.testing.assert_close(results(compiled, outputs), results(eager, expected), rtol=1e-9, atol=1e-12)


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


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Tanh(), nn.Linear(6, 3)).double()


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).double()


def test_a_member_that_changes_after_a_trace_is_seen() -> None:
    array, eager = pair(mlp)
    compiled, x = torch.compile(array, backend="eager"), normal(4, 4)
    assert_same(array, eager, run(compiled, x), run(eager, x))
    for each in (array, eager):
        each[1].eval()
    assert_same(array, eager, run(compiled, x), run(eager, x))


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return nn.Linear.forward(self, x) * self.calls


Counting = type("Counting", (nn.Linear,), {"forward": counting, "encode": lambda self, x: self(x).tanh()})
BREAKING: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Any]]] = {
    "a loss": (mlp, lambda array, x: hf.per_model(nn.functional.mse_loss)(array(x), x[:, :3])),
    "a method": (lambda: Counting(4, 3), lambda array, x: array.encode(x)),
    "a branch": (lambda: nn.Sequential(nn.Linear(4, 4), Branch(4, 3)), lambda array, x: array(x)),
    "a counter": (lambda: Counting(4, 3), lambda array, x: array(x)),
    "a member": (mlp, lambda array, x: array[1](x)),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Of torch, which asks for it where a graph breaks.
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(("make", "call"), BREAKING.values(), ids=BREAKING)
def test_what_breaks_a_graph_computes_the_same(make: Any, call: Callable[[Any, Tensor], Any], called: bool) -> None:
    array, eager = pair(make)
    x = normal(4, 4)
    if called:
        call(array, x), call(eager, x)
    compiled = torch.compile(call, backend="eager")
    for _ in range(2):
        torch.manual_seed(1)
        outputs = compiled(array, x)
        torch.manual_seed(1)
        torch.testing.assert_close(outputs, call(eager, x), rtol=1e-9, atol=1e-12)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4,)),
    "cnn": (cnn, (2, 4, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).double(), (5, 4)),
}


def dynamic() -> Any:
    """A batch size that may vary. torch 2.11 refuses a named one of BatchNorm, for a single model, too."""
    return torch.export.Dim.AUTO if torch.__version__ < (2, 12) else torch.export.Dim("batch")


def export(array: hf.FusedModule, *args: Any, strict: bool = False) -> Callable[..., Any]:
    shapes = {"args": tuple({0: dynamic()} for _ in args)}
    exported: Callable[..., Any] = torch.export.export(array, args, dynamic_shapes=shapes, strict=strict).module()
    return exported


@pytest.mark.parametrize(("name", "called"), [*((name, False) for name in CASES), ("mlp", True)])
def test_export_with_a_dynamic_batch(name: str, called: bool) -> None:
    make, shape = CASES[name]
    array = hf.fuse([make().eval() for _ in range(3)])
    if called:
        array(normal(3, *shape))
    program = export(array, normal(7, *shape))
    for samples in (2, 7, 9):
        x = normal(samples, *shape)
        torch.testing.assert_close(program(x), array(x), rtol=1e-9, atol=1e-11)


def test_export_of_what_runs_member_by_member_is_refused_in_words() -> None:
    array = hf.fuse([nn.Sequential(nn.Linear(4, 4), Branch(4, 4)).double() for _ in range(2)]).eval()
    for words in (r"torch.export cannot take what runs member by member: ", r"torch.export cannot take 1, which runs"):
        with pytest.raises(hf.FusionError, match=words):
            export(array, normal(7, 4))
        array(normal(7, 4))

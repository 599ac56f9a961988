"""Results of forward that are no tensors: each member has its own, in graphs and loops, and so has its loss."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

X = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Result:
    """A result with fields that are no tensors."""

    y: Tensor
    plain: Any
    other: Any = None


class Net(nn.Module):
    """Returns ``form(self, x)``; ``a`` is an attribute of the member."""

    def __init__(self, form: Callable[[Any, Tensor], Any], a: Any, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lin = nn.Linear(3, 1, dtype=torch.float64)
        self.a, self.form = a, form
        self.register_buffer("count", torch.tensor(seed + 1))
        self.register_buffer("scale", torch.tensor(0.5 + seed))

    def forward(self, x: Tensor) -> Any:
        return self.form(self, x)


def branching(net: Any, x: Tensor) -> Tensor:
    """A layer that only runs member by member."""
    y: Tensor = net.lin(x)
    return y if x.sum() > 100 else y * 2


# Name: the result of a member, and the members' attributes.
FORMS: dict[str, tuple[Callable[[Any, Tensor], Any], Sequence[Any]]] = {
    "number": (lambda net, x: (net.lin(x), net.a), (1.0, 2.0, 1.0)),
    "the same number": (lambda net, x: (net.lin(x), net.a), (2.5, 2.5, 2.5)),
    "computed": (lambda net, x: (net.lin(x), net.a * 2 + 1), (1, 2, 3)),
    "NaN": (lambda net, x: (net.lin(x), net.a), (math.nan, math.nan, 1.0)),
    "text": (lambda net, x: {"y": net.lin(x), "plain": net.a}, ("a", "b", "a")),
    "None or a number": (lambda net, x: (net.lin(x), net.a), (None, 2.0, None)),
    "flag": (lambda net, x: (net.lin(x), net.training and net.a), (True, False, True)),
    "True is not 1": (lambda net, x: (net.lin(x), net.a), (True, 1, 1.0)),
    "enum": (lambda net, x: (net.lin(x), net.a), (Color.RED, Color.BLUE, Color.RED)),
    "dtype": (lambda net, x: (net.lin(x), net.a), (torch.float32, torch.float64, torch.float32)),
    "nested": (lambda net, x: {"y": net.lin(x), "plain": [None, (net.a, {"k": "same"})]}, (1, 2, 3)),
    "dataclass": (lambda net, x: Result(net.lin(x), net.a), (1, 2, 3)),
    "enum in a dataclass": (lambda net, x: Result(net.lin(x), net.a), (Color.RED, Color.BLUE, Color.RED)),
    "NaN in a dataclass": (
        lambda net, x: {"y": net.lin(x), "plain": net.a, "z": Result(x, net.a)},
        (math.nan, 1.0, 2.0),
    ),
    "int of a buffer": (lambda net, x: (net.lin(x), int(net.count)), (0, 0, 0)),
    "float of a buffer": (lambda net, x: (net.lin(x), float(net.scale)), (0, 0, 0)),
    "float of a size": (lambda net, x: (net.lin(x), 0.5 * x.shape[0]), (0, 0, 0)),
    "size": (lambda net, x: (net.lin(x), x.shape[0]), (0, 0, 0)),
    "number of a tensor": (lambda net, x: (net.lin(x), net.lin(x).mean().item()), (0, 0, 0)),
    "flag of a tensor": (lambda net, x: (net.lin(x), bool(net.lin(x).mean() > 0)), (0, 0, 0)),
    "beside a loop": (lambda net, x: (branching(net, x), net.a), (1.0, 2.0, 1.0)),
    "text beside a loop": (lambda net, x: (branching(net, x), net.a), ("a", "a", "a")),
}


def parts(out: Any) -> tuple[Tensor, Any]:
    if isinstance(out, Result):
        return out.y, out.plain
    return (out["y"], out["plain"]) if isinstance(out, dict) else out


def loss(out: Any, target: Tensor) -> Tensor:
    """Weigh a member's loss by its own value, whose type must be that of the member alone."""
    y, plain = parts(out)
    plain = plain[1][0] if isinstance(plain, list) else plain
    assert not isinstance(plain, tuple | Tensor)
    number = plain if isinstance(plain, int | float) and plain == plain else 2.0 * len(str(plain))
    return F.mse_loss(y, target) * (1 + abs(number) + 0.1 * len(type(plain).__name__))


def nets(name: str) -> list[nn.Module]:
    form, values = FORMS[name]
    return [Net(form, a, seed) for seed, a in enumerate(values)]


def alone(models: Sequence[nn.Module], steps: int = 2) -> Tensor:
    """The losses ``[steps, B]`` of members that train alone."""
    losses = []
    for model in copy.deepcopy(list(models)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(steps):
            optimizer.zero_grad()
            value = loss(model(X), Y)
            value.backward()
            optimizer.step()
            losses.append(value.detach())
    return torch.stack(losses).view(len(models), steps).T


def sgd(params: Any) -> hf.optim.SGD:
    return hf.optim.SGD(params, lr=0.05)


def by_step(models: list[nn.Module]) -> Tensor:
    fused = hf.fuse(models)
    step = hf.train_step(fused, loss, sgd(fused.parameters()), compile=False)
    return torch.stack([step(X, Y) for _ in range(2)])


def by_population(models: list[nn.Module]) -> Tensor:
    pop = hf.Population(models, optimizer=sgd, loss=loss, compile=False)
    return torch.stack([pop.step(X, Y) for _ in range(2)])


def by_rows(models: list[nn.Module]) -> Tensor:
    pop = hf.Population(models, optimizer=sgd, loss=loss, compile=False)
    both = [(pop.step(X, Y, rows=[0, 2]), pop.step(X, Y, rows=[1])) for _ in range(2)]
    return torch.stack([torch.where(first.isnan(), second, first) for first, second in both])


def by_modes(models: list[nn.Module]) -> Tensor:
    """A member with a hook runs as its own code, apart from the others."""
    fused = hf.fuse(models)
    fused[1].register_forward_hook(lambda module, args, out: None)
    step = hf.train_step(fused, loss, sgd(fused.parameters()), compile=False)
    return torch.stack([step(X, Y) for _ in range(2)])


CLIENTS = {"train_step": by_step, "Population": by_population, "rows=": by_rows, "hook": by_modes}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore:train_step")
def test_a_loss_sees_the_member_s_own_value(name: str, client: str) -> None:
    models = nets(name)
    torch.testing.assert_close(CLIENTS[client](copy.deepcopy(models)), alone(models), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("name", FORMS)
def test_different_values_are_a_tuple_with_one_per_member_and_equal_ones_the_value(name: str) -> None:
    models = nets(name)
    expected = [parts(model(X))[1] for model in models]
    for _ in range(2):
        plain = parts(hf.fuse(copy.deepcopy(models))(X))[1]
        if name == "nested":
            assert plain == [None, ((1, 2, 3), {"k": "same"})]
        elif all(type(value) is type(expected[0]) and repr(value) == repr(expected[0]) for value in expected):
            assert (type(plain), repr(plain)) == (type(expected[0]), repr(expected[0]))
        else:
            assert list(map(repr, plain)) == list(map(repr, expected))


def test_a_metric_gets_a_constant_once_and_what_differs_between_batches_as_a_list() -> None:
    seen: list[Any] = []

    def look(out: Any, target: Tensor) -> float:
        seen.append((out["a"], out["size"], out["none"], tuple(out["mean"].shape)))
        return 0.0

    def form(net: Any, x: Tensor) -> dict[str, Any]:
        return {"y": net.lin(x), "a": net.a, "size": x.shape[0], "none": None, "mean": net.lin(x).mean()}

    pop = hf.Population([Net(form, a, seed) for seed, a in enumerate("ab")], optimizer=sgd, loss=loss, compile=False)
    pop.evaluate(look, [(X[:3], Y[:3]), (X[3:], Y[3:])])
    assert seen == [("a", [3, 5], None, (2,)), ("b", [3, 5], None, (2,))]


def test_members_of_different_structures_are_refused_in_words() -> None:
    loops = [Net(lambda net, x: (branching(net, x), net.lin(x)) if net.a else branching(net, x), a, 0) for a in (0, 1)]
    with pytest.raises(hf.FusionError, match="model"):
        hf.fuse(loops)(X)
    mixed = [Net(lambda net, x: (net.lin(x), net.lin(x).mean() if net.a else 1.0), a, 0) for a in (0, 1)]
    with pytest.raises(hf.ForwardsDiffer, match="model 0"):
        hf.fuse(mixed)(X)

"""A loss for each member, results that are no tensors, and warnings of sizes that were surely meant otherwise."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests import alone
from tests.alone import Call, Member, call, normal
from tests.forwards.outside import put
from tests.forwards.table import Sevenfold

# A function per member equals the function called on each member's row, also when what it reads changes.
TARGET = torch.tensor([0, 3, 1, 2, 0])


def outputs() -> Tensor:
    return normal(3, 5, 4).requires_grad_()


def check(per_model: Callable[..., Any], function: Callable[..., Any], y: Tensor, more: Call = call()) -> None:  # noqa: B008
    """Values and gradients against one call per row."""
    actual = per_model(y, *more.args, **more.kwargs)
    rows = [more.of_member(b) for b in range(len(y))]
    expected = torch.stack([function(y[b], *args, **kwargs) for b, (args, kwargs) in enumerate(rows)])
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    grads = [torch.autograd.grad(loss.sin().sum(), y)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


CASES: dict[str, tuple[Callable[..., Any], Call]] = {
    "cross entropy": (F.cross_entropy, call(TARGET)),
    "reduction none": (F.cross_entropy, call(TARGET, reduction="none")),
    "own targets": (F.cross_entropy, call(hf.stacked(torch.randint(4, (3, 5), generator=torch.Generator())))),
    "mse": (F.mse_loss, call(normal(5, 4))),
    "module": (nn.CrossEntropyLoss(weight=torch.rand(4).double(), label_smoothing=0.1), call(TARGET)),
    "partial": (functools.partial(F.cross_entropy, label_smoothing=0.2), call(TARGET)),
    "lambda": (lambda y, t, k: F.mse_loss(y, t) * k, call(normal(5, 4), 3)),
    "custom Function": (lambda y: Sevenfold.apply(y).sum(), call()),
    "branch on values": (lambda y: y.sum() * (2 if y.sum() > 0 else 3), call()),
    "mask": (lambda y: y[y > 0].sum(), call()),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_rows(name: str) -> None:
    function, more = CASES[name]
    per_model = hf.per_model(function)
    for _ in range(2):
        check(per_model, function, outputs(), more)
    check(per_model, function, outputs() * 2, more)


class Config:
    beta = 1.0

    def loss(self, y: Tensor) -> Tensor:
        return y.sum() * self.beta

    __call__ = loss


def closure() -> tuple[Callable[..., Any], Callable[[float], Any]]:
    beta, weights = 1.0, torch.ones(4, dtype=torch.float64)

    def function(y: Tensor) -> Tensor:
        return (y * weights).sum() * beta

    def change(value: float) -> None:
        nonlocal beta, weights
        beta = value
        weights = weights + value
        weights.mul_(2)

    return function, change


CONFIG, OTHER = Config(), Config()
# What a loss reads besides is in tests/forwards/outside.py.
CHANGES: dict[str, tuple[Callable[..., Any], Callable[[float], Any]]] = {
    "closure": closure(),
    "method": (CONFIG.loss, put(CONFIG, "beta")),
    "callable": (OTHER, put(OTHER, "beta")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_what_it_reads_are_seen(name: str) -> None:
    function, change = CHANGES[name]
    per_model = hf.per_model(function)
    for value in [3.0, 5.0, 0.5, *range(2, 20)]:
        check(per_model, function, outputs())
        change(value)
        check(per_model, function, outputs())


class Own:
    def __init__(self, beta: float) -> None:
        self.beta = beta

    def loss(self, y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y, t) * self.beta


WEIGHT = torch.rand(4, dtype=torch.float64)
# How people write a loss inside the loop: a function for every call, by a number that it reads.
REMADE: dict[str, Callable[[float], Callable[..., Any]]] = {
    "function": lambda k: F.cross_entropy,
    "partial": lambda k: functools.partial(F.cross_entropy, label_smoothing=k / 10),
    "partial of a tensor": lambda k: functools.partial(F.cross_entropy, weight=WEIGHT, label_smoothing=k / 10),
    "lambda": lambda k: lambda y, t: F.cross_entropy(y, t) * k,
    "zeros": lambda k: lambda y, t, zero=k * 0.0: F.cross_entropy(y, t) * (3 + math.copysign(1, zero)),
    "module": lambda k: nn.CrossEntropyLoss(label_smoothing=k / 10),
    "module with a tensor": lambda k: nn.CrossEntropyLoss(weight=WEIGHT * k),
    "bound method": lambda k: Own(k).loss,
}


@pytest.mark.parametrize("name", REMADE)
def test_a_recreated_function_reuses_its_program(name: str) -> None:
    programs: set[Any] = set()
    for k in (1.0, 2.0, -1.0 if name in ("lambda", "zeros", "bound method") else 3.0) * 3:
        mapped = hf.per_model(REMADE[name](k))
        check(mapped, REMADE[name](k), outputs(), call(TARGET))
        programs |= set(mapped.programs)
    assert len(programs) <= 3


def test_a_loss_that_writes_into_its_inputs_is_reported() -> None:
    outputs = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def doubled(y: Tensor, target: Tensor) -> Tensor:
        return (y.mul_(2) - target).square().mean()

    def into_target(y: Tensor, target: Tensor) -> Tensor:
        return (y - target.mul_(2)).square().mean()

    target = torch.ones(3, 4, dtype=torch.float64)
    for loss in (doubled, into_target):
        with pytest.raises(hf.FusionError, match=f"{loss.__name__} writes into its arguments"):
            hf.per_model(loss)(outputs * 1, target)
    targets = torch.ones(2, 3, 4, dtype=torch.float64)
    expected = torch.stack([into_target(y, t) for y, t in zip(outputs, targets.clone(), strict=True)])
    torch.testing.assert_close(hf.per_model(into_target)(outputs * 1, hf.stacked(targets)), expected)
    assert torch.equal(targets, torch.full_like(targets, 2.0))


# Results of forward that are no tensors: each member has its own, in graphs and loops, and so has its loss.
X = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


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
    "NaN": (lambda net, x: (net.lin(x), net.a), (math.nan, math.nan, 1.0)),
    "None or a number": (lambda net, x: (net.lin(x), net.a), (None, 2.0, None)),
    "flag": (lambda net, x: (net.lin(x), net.training and net.a), (True, False, True)),
    "True is not 1": (lambda net, x: (net.lin(x), net.a), (True, 1, 1.0)),
    "nested": (lambda net, x: {"y": net.lin(x), "plain": [None, (net.a, {"k": "same"})]}, (1, 2, 3)),
    "dataclass": (lambda net, x: Result(net.lin(x), net.a), (1, 2, 3)),
    "NaN in a dataclass": (
        lambda net, x: {"y": net.lin(x), "plain": net.a, "z": Result(x, net.a)},
        (math.nan, 1.0, 2.0),
    ),
    "int of a buffer": (lambda net, x: (net.lin(x), int(net.count)), (0, 0, 0)),
    "size": (lambda net, x: (net.lin(x), x.shape[0]), (0, 0, 0)),
    "number of a tensor": (lambda net, x: (net.lin(x), net.lin(x).mean().item()), (0, 0, 0)),
    "flag of a tensor": (lambda net, x: (net.lin(x), bool(net.lin(x).mean() > 0)), (0, 0, 0)),
    "beside a loop": (lambda net, x: (branching(net, x), net.a), (1.0, 2.0, 1.0)),
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


def sgd(params: Any) -> hf.optim.SGD:
    return hf.optim.SGD(params, lr=0.05)


def by_step(models: list[nn.Module]) -> Tensor:
    fused = hf.fuse(models)
    step = hf.train_step(fused, loss, sgd(fused.parameters()), compile=False)
    return torch.stack([step(X, Y) for _ in range(2)])


def by_population(models: list[nn.Module]) -> Tensor:
    pop = hf.Population(models, optimizer=sgd, loss=loss, compile=False)
    return torch.stack([pop.step(X, Y) for _ in range(2)])


@pytest.mark.parametrize("client", [by_step, by_population])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore:train_step")
def test_a_loss_sees_the_member_s_own_value(name: str, client: Callable[[list[nn.Module]], Tensor]) -> None:
    models = nets(name)
    losses = client(copy.deepcopy(models))
    for row, model in enumerate(models):
        expected = Member(model, torch.optim.SGD, loss, alone.Own(0.05)).epoch([(X, Y)] * 2)
        torch.testing.assert_close(losses[:, row], expected, rtol=1e-9, atol=0.0)


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


# Targets of sizes that a loss broadcasts: warned of as alone, and where they were surely meant to be stacked.
B, N = 3, 5


def checked(output: Tensor, target: Tensor) -> Tensor:
    if (target < -1e9).any():
        raise ValueError
    return F.mse_loss(output, target)


LOSSES: dict[str, Callable[..., Any]] = {"mse": F.mse_loss, "that checks values": checked}


def told(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_torchs_own_warnings(loss: Callable[..., Any]) -> None:
    outputs = torch.randn(B, N, 1)
    for target in (torch.randn(N), torch.randn(B, N, N)):
        alone = told(lambda target=target: loss(outputs[0], target))
        messages = told(lambda target=target: hf.per_model(loss)(outputs, target))
        assert len(alone) == 1
        assert [text for text in messages if "hf.stacked" not in text] == alone
    stacked = told(lambda: hf.per_model(loss)(outputs, hf.stacked(torch.randn(B, N))))
    assert stacked == told(lambda: loss(outputs[0], torch.randn(N)))


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize("loss", [F.mse_loss, lambda output, target: ((output - target) ** 2).mean()])
def test_a_target_for_each_member_that_was_not_stacked(loss: Callable[..., Any]) -> None:
    outputs, target = torch.randn(B, N), torch.randn(B, N)
    message = rf"has shape \[{B}, {N}\], a member's output \[{N}\].*give hf.stacked\(target\)"
    with pytest.warns(UserWarning, match=message) as caught:
        hf.per_model(loss)(outputs, target)
    assert all(warning.filename == __file__ for warning in caught)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout(0.1), nn.Linear(4, 1))


def test_an_mlp_warns_once_and_blames_the_caller() -> None:
    fused = hf.fuse([mlp() for _ in range(B)])
    with pytest.warns(
        UserWarning, match=rf"3 members sees the whole input of shape \[{B}, {N}, 2\].*hf\.stacked"
    ) as caught:
        outputs = fused(torch.randn(B, N, 2))
    assert outputs.shape == (B, B, N, 1)
    assert [warning.filename for warning in caught] == [__file__]
    fused(torch.randn(B, N + 1, 2))
    copy.deepcopy(fused.eval())(hf.stacked(torch.randn(B, N, 2)))

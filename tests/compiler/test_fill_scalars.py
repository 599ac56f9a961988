"""Members that differ in numbers: a few captures serve any number of them, each with its own."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.capture import export
from hfusion.compiler.fill_scalars import MAX_CAPTURES
from hfusion.core.errors import ForwardsDiffer

MEMBERS = 6


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the modules that were exported."""
    names: list[str] = []
    exported = export._exported

    def counted(module: nn.Module, *args: Any) -> Any:
        names.append(type(module).__name__)
        return exported(module, *args)

    monkeypatch.setattr(export, "_exported", counted)
    monkeypatch.setattr(export, "_captures", type(export._captures)())
    return names


@dataclass
class Config:
    beta: float
    inner: dict[str, float]


class Numbers(nn.Module):
    """A linear layer, and what ``act(self, x)`` makes of its result; ``number`` in several places."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor], number: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = act
        self.number = number
        self.config = Config(number, {"scale": number})
        self.listed = [1.0, number]
        self.partial = functools.partial(F.leaky_relu, negative_slope=number)
        self.closure = lambda x: x * number
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.linear(x))


def _assigns(m: Any, x: Tensor) -> Any:
    m.average = m.average * m.number + x.detach().mean(0) * (1 - m.number)
    return x + m.average


def _writes(m: Any, x: Tensor) -> Any:
    m.average.mul_(m.number).add_(x.detach().mean(0), alpha=1 - m.number)
    return x.clone().mul_(m.number) + m.average


def _without_gradients(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        weights = (x * m.number).softmax(1)
    return x * weights + m.number


FLOATS = [0.1 + 0.07 * k for k in range(MEMBERS)]
INTS = list(range(1, MEMBERS + 1))


def _topk(m: Any, x: Tensor) -> Tensor:
    values, places = x.topk(m.number, -1)
    return torch.zeros_like(x).scatter(-1, places, values / values.shape[-1])


# What is computed, and the numbers of the members.
CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[Any]]] = {
    "an attribute": (lambda m, x: x * m.number, FLOATS),
    "its reciprocal": (lambda m, x: x + 1 / m.number, FLOATS),
    "a sum of it": (lambda m, x: (x - m.number) * (2 * m.number + 1), FLOATS),
    "a number made an int": (lambda m, x: x * int(m.number * 100), FLOATS),
    "zero and one among them": (lambda m, x: F.leaky_relu(x, m.number), [0.0, 1.0, -0.0, 0.5, 0.25, 2.0]),
    "ints and floats": (lambda m, x: x * m.number, [1, 1.5, 2, 2.5, 3, 0]),
    "twice the same": (lambda m, x: F.elu(x, m.number) * m.number, [0.5, 0.5, 1.0, 1.0, 1.5, 2.0]),
    "a data class": (lambda m, x: F.softplus(x, m.config.beta), FLOATS),
    "a dict in it": (lambda m, x: x / m.config.inner["scale"], FLOATS),
    "a list": (lambda m, x: x * m.listed[1] + m.listed[0], FLOATS),
    "a partial": (lambda m, x: m.partial(x), FLOATS),
    "a closure": (lambda m, x: m.closure(x), FLOATS),
    "a tensor made of it": (lambda m, x: x * torch.tensor(m.number, dtype=x.dtype), FLOATS),
    "a tensor of several": (lambda m, x: x + torch.tensor([m.number, 1, 2, 1 / m.number], dtype=x.dtype), FLOATS),
    "a filled tensor": (lambda m, x: x * torch.full((4,), m.number, dtype=x.dtype), FLOATS),
    "an in-place write": (_writes, FLOATS),
    "a buffer that is assigned": (_assigns, FLOATS),
    "no gradients": (_without_gradients, FLOATS),
    "an exponent": (lambda m, x: (x * x + 1) ** m.number, FLOATS),
    "an int exponent": (lambda m, x: x**m.number, INTS),
    "an int shift": (lambda m, x: x.roll(m.number, 1), INTS),
    "the k of topk": (_topk, [1, 2, 3, 4, 3, 1]),
    "a repetition": (lambda m, x: x.repeat(1, m.number).view(len(x), -1, 4).sum(1), INTS),
    "a bound": (lambda m, x: x.clamp(max=m.number), INTS),
    "a flag of an operator": (lambda m, x: x.std(0, unbiased=m.number), [True, False] * (MEMBERS // 2)),
    "sizes and a number": (lambda m, x: x * m.number / x.shape[0], FLOATS),
    "a check that passes": (lambda m, x: x * m.number if m.number < 5 else x, FLOATS),
}


def members(act: Callable[[Any, Tensor], Tensor], numbers: list[Any]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Numbers(act, number).double() for number in numbers]


def check(fused: Any, models: list[nn.Module], x: Tensor) -> None:
    """Values, gradients and buffers are those of the loop."""
    y = fused(x)
    alone = [model(x) for model in models]
    y.square().sum().backward()
    for b, (model, output) in enumerate(zip(models, alone, strict=True)):
        torch.testing.assert_close(y[b], output, rtol=1e-9, atol=1e-12)
        output.square().sum().backward()
        grad = model.get_parameter("linear.weight").grad
        torch.testing.assert_close(fused.linear.weight.grad[b], grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(fused.average[b], model.average, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_any_kind_cost_a_few_captures(name: str, exports: list[str]) -> None:
    act, numbers = CASES[name]
    models = members(act, numbers)
    fused = hf.fuse(models)
    x = torch.randn(8, 4, dtype=torch.float64)
    check(fused, models, x)
    assert len(exports) <= MAX_CAPTURES


@pytest.mark.parametrize("name", CASES)
def test_members_that_join_cost_no_capture(name: str, exports: list[str]) -> None:
    act, numbers = CASES[name]
    models = members(act, numbers)
    fused = hf.fuse(models[:-1])
    x = torch.randn(8, 4, dtype=torch.float64)
    check(fused, models[:-1], x)
    fused.zero_grad()
    models = [copy.deepcopy(model) for model in [*fused, models[-1]]]
    before = len(exports)
    fused.append([models[-1]])
    check(fused, models, x)
    # Where an int may decide on sizes, a capture asks.
    assert len(exports) == before or name == "an int shift"
    check(fused, models, x[:5]) if name not in ("a buffer that is assigned", "an in-place write") else None


@pytest.mark.parametrize("train", [True, False])
def test_layers_of_torch(train: bool, exports: list[str]) -> None:
    def model(k: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 4),
            nn.BatchNorm1d(4, eps=1e-5 * (k + 1), momentum=0.1 * k),
            nn.Dropout((k + train) / (MEMBERS + 1)),
            nn.LeakyReLU(0.1 * k),
            nn.LayerNorm(4, eps=1e-6 * (k + 1)),
        ).train(train)

    models = [model(k) for k in range(MEMBERS)]
    fused = hf.fuse(models)
    x = torch.randn(8, 4)
    y = fused(x)
    assert len(exports) <= MAX_CAPTURES
    if train:
        assert "self-check passed" in str(fused.report())
    else:
        torch.testing.assert_close(y, torch.stack([model(x) for model in models]))


def test_each_member_differs_in_another_place(exports: list[str]) -> None:
    class Many(nn.Module):
        def __init__(self, position: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.numbers = [1.0 + 0.5 * (position == k) for k in range(8)]
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.linear(x)
            for k, number in enumerate(self.numbers):
                h = h.sin() * number + k
            return h

    models: list[nn.Module] = [Many(position).double() for position in range(8)]
    check(hf.fuse(models), models, torch.randn(8, 4, dtype=torch.float64))
    assert len(exports) <= MAX_CAPTURES


def _branches(m: Any, x: Tensor) -> Tensor:
    return x.relu() if m.number > 0.3 else x.tanh()


def _steps(m: Any, x: Tensor) -> Tensor:
    for _ in range(m.number):
        x = x.sin()
    return x


@pytest.mark.parametrize(("act", "numbers"), [(_branches, FLOATS), (_steps, INTS)])
def test_a_number_that_steers_forward_is_noticed(act: Any, numbers: list[Any]) -> None:
    fused = hf.fuse(members(act, numbers))
    with pytest.raises(ForwardsDiffer):
        fused(torch.randn(8, 4, dtype=torch.float64))


def _limited(m: Any, x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > m.number else x


def _limited_by_local(m: Any, x: Tensor) -> Tensor:
    limit = int(m.config.beta)
    return x * 2 if x.shape[0] > limit else x


def _shared_part(m: Any, x: Tensor) -> Tensor:
    part = max(x.shape[0] // m.number, 1)
    return x + x[:part].sum(0)


@pytest.mark.parametrize("act", [_limited, _limited_by_local, _shared_part])
@pytest.mark.parametrize("numbers", [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 6], [9, 10, 11, 12, 13, 30]])
def test_a_number_that_meets_a_size_is_right_at_every_size(act: Any, numbers: list[Any]) -> None:
    if act is _shared_part and 0 in numbers:
        numbers = [number + 1 for number in numbers]
    models = members(act, numbers)
    fused = hf.fuse(models)
    for size in (8, 5, 3, 20):
        x = torch.randn(size, 4, dtype=torch.float64)
        try:
            y = fused(x)
        except hf.FusionError:
            # Members do different things at this size.
            continue
        torch.testing.assert_close(y, torch.stack([model(x) for model in models]), rtol=1e-9, atol=1e-12)


class Computing(Numbers):
    """Its limit is computed of its number where it is read."""

    @property
    def limit(self) -> float:
        return 10 * float(self.number)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        return h * 2 if x.shape[0] > self.limit else h


def test_a_property_that_is_compared_with_a_size() -> None:
    models: list[nn.Module] = [Computing(_limited, number).double() for number in (0.1, 0.11, 0.12, 0.13, 0.6)]
    fused = hf.fuse(models)
    for size in (8, 4):
        x = torch.randn(size, 4, dtype=torch.float64)
        try:
            y = fused(x)
        except ForwardsDiffer:
            continue
        torch.testing.assert_close(y, torch.stack([model(x) for model in models]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("train", [True, False])
def test_equal_members_and_one_that_joins_with_another_number(train: bool, exports: list[str]) -> None:
    act, numbers = CASES["an attribute"]
    models = [model.train(train) for model in members(act, [numbers[0]] * 3 + [numbers[1]])]
    fused = hf.fuse(models[:-1])
    x = torch.randn(8, 4, dtype=torch.float64)
    check(fused, models[:-1], x)
    fused.zero_grad()
    fused.append([models[-1]])
    torch.testing.assert_close(fused(x), torch.stack([model(x) for model in models]), rtol=1e-9, atol=1e-12)
    assert len(exports) == 1


class Hooked(nn.Module):
    """Scales gradients by a hook, which no operator of the graph shows."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = factor
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * self.factor)
        return h * 1.0


def test_hooks_that_hold_numbers() -> None:
    # A hook that changes nothing is not seen in a capture of that member; another's is, so all run their own code.
    models: list[nn.Module] = [Hooked(factor).double() for factor in (1.0, 1.0 + 1e-3, 0.5, -1.0, 2.0)]
    check(hf.fuse(models), models, torch.randn(8, 4, dtype=torch.float64))


def test_a_population_takes_members_with_numbers_of_their_own(exports: list[str]) -> None:
    numbers = itertools.count(1)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.01 * next(numbers)), nn.Linear(4, 3))

    population = hf.Population(
        [model() for _ in range(5)],
        optimizer=lambda parameters: hf.optim.SGD(parameters, lr=0.1),
        loss=F.cross_entropy,
        compile=False,
    )
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    population.step(x, y)
    before = len(exports)
    for row in (0, 1, 4):
        population.stop(row)
        population.start(row, model())
        population.step(x, y)
    assert len(exports) == before

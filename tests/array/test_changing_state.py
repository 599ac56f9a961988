"""Variables and attributes that forward reads and that change while an array lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import hfusion as hf


def programs(fused: hf.FusedModule) -> int:
    return len(fused.report().parts)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Asking(nn.Module):
    """Checks whether autocast is on, both outside and inside its own autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).float() * (3 if torch.is_autocast_enabled("cpu") else 7)
        with torch.autocast("cpu", enabled=False):
            return self.last(x) if torch.is_autocast_enabled("cpu") else self.last(x + 1)


@pytest.mark.parametrize("order", [(False, True, False), (True, False, True)])
@pytest.mark.parametrize("compiled", [False, True])
def test_forward_sees_the_current_autocast_state(order: tuple[bool, ...], compiled: bool) -> None:
    models = [Asking() for _ in range(2)]
    fused, x = hf.fuse(models), torch.randn(5, 3)
    optimizer = hf.optim.SGD(fused.parameters(), lr=0.0)
    loss = lambda y, target: y.square().mean()  # noqa: E731
    step = hf.train_step(fused, loss, optimizer, compile=compiled)
    for enabled in order:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                alone = torch.stack([loss(model(x), None).detach() for model in models])
                torch.testing.assert_close(step(x, None), alone, rtol=1e-2, atol=1e-4)
    assert programs(fused) == 2


@contextmanager
def changed(set_: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(before)


# A setting of torch that forward asks for, and a region in which it is another.
SETTINGS_OF_TORCH: dict[str, tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]]]] = {
    "threads": (
        lambda: torch.get_num_threads() > 2,
        lambda: changed(torch.set_num_threads, 3, torch.get_num_threads()),
    ),
    "determinism": (
        lambda: torch.are_deterministic_algorithms_enabled(),
        lambda: changed(torch.use_deterministic_algorithms, True, False),
    ),
    "inference": (lambda: torch.is_inference_mode_enabled(), torch.inference_mode),
    "the dtype of autocast": (
        lambda: torch.get_autocast_dtype("cpu") is torch.float16,
        lambda: torch.autocast("cpu", dtype=torch.float16),
    ),
    "by a text": (
        lambda: getattr(torch, "is_anomaly_enabled")(),  # noqa: B009
        torch.autograd.detect_anomaly,
    ),
    "a seed": (lambda: torch.initial_seed() == 7, lambda: changed(torch.manual_seed, 7, 8)),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SETTINGS_OF_TORCH)
@pytest.mark.parametrize("first", [False, True])
def test_settings_of_torch_count_as_they_are_at_each_call(name: str, first: bool, x: Tensor) -> None:
    ask, region = SETTINGS_OF_TORCH[name]

    class Asking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (3 if ask() else 1)

    models = [Asking(3, 2).double() for _ in range(2)]
    fused, losses = hf.fuse(models), hf.per_model(lambda y: y.sum() * (3 if ask() else 1))
    for other in (first, not first, first):
        with region() if other else nullcontext():
            alone = torch.stack([model(x) for model in models])
            torch.testing.assert_close(fused(x), alone, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(losses(alone), alone.sum((1, 2)) * (3 if ask() else 1))


# Attributes of members that a training loop sets at every step: annealed numbers, flags, texts, lists.
STEPS = 12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2))
        self.alpha, self.power, self.tag, self.weights = 1.0, 1, "plain", [1.0, 2.0]
        self.flag: Any = False
        self.head[0].scale = 1.0  # type: ignore[assignment]
        self.epoch = 0

    def reverse(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.reverse(self.body(x))
        x = torch.softmax(x * self.weights[0] / self.alpha, -1) ** self.power
        x = self.head(x) * self.head[0].scale
        if self.flag is None:
            return x.abs()
        return -x if self.flag else x + len(self.tag)


class Plain(nn.Linear):
    """A model whose only attribute is not read by forward."""

    epoch: int

    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


# What is set on member ``b`` of three before step ``t``.
CHANGES: Mapping[str, Callable[[Any, int, int], object]] = {
    "number": lambda m, b, t: setattr(m, "alpha", 1.0 + t / 8),
    "number of each": lambda m, b, t: setattr(m, "alpha", 1.0 + t / 8 + b),
    "number of one": lambda m, b, t: setattr(m, "alpha", 1.0 + t / 8) if b == 1 else None,
    "flag": lambda m, b, t: setattr(m, "flag", [False, True, None][t % 3]),
    "text": lambda m, b, t: setattr(m, "tag", "x" * t),
    "list": lambda m, b, t: m.weights.__setitem__(0, 1.0 + t / 8),
    "submodule": lambda m, b, t: setattr(m.head[0], "scale", 1.0 + t / 8),
    "curriculum": lambda m, b, t: setattr(m, "alpha", 1.0 + t // 4),
    "unread": lambda m, b, t: setattr(m, "epoch", t),
}


def members(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [(Plain() if kind == "unread" else Model()).double() for _ in range(3)]


@pytest.mark.filterwarnings("ignore:train_step of:UserWarning")
@pytest.mark.parametrize("compiled_step", [False, True])
@pytest.mark.parametrize("kind", CHANGES)
def test_attributes_set_at_every_step(kind: str, compiled_step: bool) -> None:
    models, fused = members(kind), hf.fuse(members(kind))
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(STEPS)]
    target = torch.zeros(5, 2, dtype=torch.float64)
    optimizer = hf.optim.Adam(fused.parameters(), lr=1e-2)
    own = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    step = hf.train_step(fused, nn.functional.mse_loss, optimizer, compile=False if not compiled_step else None)
    for t, x in enumerate(batches):
        for b, member in enumerate(fused):
            CHANGES[kind](member, b, t)
        losses = step(x, target)
        for b, (model, optim) in enumerate(zip(models, own, strict=True)):
            CHANGES[kind](model, b, t)
            optim.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optim.step()
            torch.testing.assert_close(losses[b], loss, rtol=1e-9, atol=1e-12)
    for model, member in zip(models, fused.unfuse(), strict=True):
        torch.testing.assert_close(member.state_dict(), model.state_dict(), rtol=1e-9, atol=1e-12)
        assert {k: v for k, v in vars(member).items() if k in ("alpha", "tag", "epoch", "weights", "flag")} == {
            k: v for k, v in vars(model).items() if k in ("alpha", "tag", "epoch", "weights", "flag")
        }
    report = fused.report()
    assert len(report.parts) <= (1 if kind == "unread" else 4)
    assert ("changes often" in str(report)) == (kind not in ("unread", "flag", "curriculum"))


class Counting(nn.Module):
    """A layer with a parametrized weight, run as the members' own code since it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = parametrizations.weight_norm(nn.Linear(3, 3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.layer(x)
        return y


def test_members_have_their_own_weights_where_torch_caches_parametrizations(x: Tensor) -> None:
    models = []
    # torch takes the cached weights of a module for those of its deep copies.
    for _ in range(2):
        torch.manual_seed(0)
        models.append([Counting().double() for _ in range(3)])
    fused, alone = hf.fuse(models[0]), models[1]
    for _ in range(3):
        with parametrize.cached():
            y = fused(x) + fused(2 * x)
            expected = torch.stack([model(x) + model(2 * x) for model in alone])
        torch.testing.assert_close(y, expected)

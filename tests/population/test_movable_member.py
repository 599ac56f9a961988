"""Plain members that stay in this process, as a fork would keep effects of their forward to itself."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from hfusion.population.movable_member import MovableMember, why_not_loss
from hfusion.population.plain_member import PlainMember
from tests.population.test_spread_members import Dense, at_once, batch, forks, population, same

__all__ = ["at_once"]


def knowledge(pop: Any) -> list[MovableMember]:
    return [pop._spread._movable_members[group] for group in pop._groups]  # type: ignore[index]


class Counting(Dense):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * self.calls


class Keeping(Dense):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.kept: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        sums = self.kept
        sums.append(float(x.sum()))
        return super().forward(x) * len(sums)


class Printing(Dense):
    def forward(self, x: Tensor) -> Tensor:
        print("forward")
        return super().forward(x)


class Drawing(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


BANK = torch.zeros(3)


class Banking(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + BANK


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Counting, "assigns calls"),
        (Keeping, ""),
        (Printing, "names print"),
        (Drawing, "names random"),
        (Banking, "BANK is of class Tensor"),
    ],
)
def test_members_whose_forward_has_effects_stay(make: Callable[[int], nn.Module], why: str, capsys: Any) -> None:
    results = []
    for processes in (0, 3):
        torch.manual_seed(0)
        random.seed(0)
        pop = population(processes, [make(3), Dense(4), Dense(5), make(6), Dense(7)])
        results.append([pop.step(*batch(step)) for step in range(4)])
    assert forks(pop) is not None
    for step in range(4, 100):
        # Until a fork was asked to compute it: by the times of steps, this process may do so at first.
        if why or knowledge(pop)[0].stays:
            break
        pop.step(*batch(step))
    pop.step(*batch(100))
    first, second = knowledge(pop)[:2]
    assert why in first.why_not
    assert first.stays is (not why)
    assert not second.why_not
    assert not second.stays
    same(*results)


def test_a_view_of_a_parameter_follows() -> None:
    pop = population(3)
    [model] = [pop.models[0]]
    assert model is not None
    view = model.get_parameter("first.weight").detach()
    for step in range(3):
        pop.step(*batch(step))
        assert torch.equal(view, model.get_parameter("first.weight"))
    assert [member.stays for member in knowledge(pop)] == [True, False, False, False, False, False]
    assert forks(pop) is not None


class Config:
    scale = 2.0


class WithObject(Dense):
    def __init__(self) -> None:
        super().__init__(3)
        self.config = Config()


class WithGenerator(Dense):
    def __init__(self) -> None:
        super().__init__(3)
        self.generator = torch.Generator()


class Writing(Dense):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y[0] = 0
        return y


class Asking(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.initial_seed()


def hooked() -> nn.Module:
    model = Dense(3)
    model.first.register_forward_hook(lambda module, args, output: None)
    return model


def with_partial() -> nn.Module:
    model = Dense(3)
    model.act = functools.partial(torch.add, 1)
    return model


class Collecting(Dense):
    def forward(self, x: Tensor) -> Tensor:
        rows = [super(Collecting, self).forward(x) for _ in range(2)]
        rows.append(rows[0] + 1)
        return torch.stack(rows).sum(0)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (WithObject, "config is of class Config"),
        (WithGenerator, "generator is of class Generator"),
        (with_partial, "act is of class partial"),
        (lambda: Writing(3), "assigns items"),
        (lambda: Asking(3), "state of random numbers"),
        (hooked, "first has a hook"),
        (lambda: Collecting(3), ""),
        (lambda: Dense(3), ""),
        (lambda: nn.TransformerEncoderLayer(4, 2), ""),
        (lambda: nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.GRU(3, 2)), ""),
    ],
)
def test_why_a_member_stays(make: Callable[[], nn.Module], why: str) -> None:
    [group, _] = population(0, [make(), nn.Linear(4, 3)])._groups
    reason = MovableMember(cast(PlainMember, group)).why_not
    assert why in reason
    assert bool(reason) is bool(why)


HISTORY: list[Tensor] = []


def recording(output: Tensor, target: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(output, target)
    HISTORY.append(loss)
    return loss


def weighed(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() * 2


class OwnLoss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).mean()


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (nn.functional.mse_loss, ""),
        (weighed, ""),
        (functools.partial(nn.functional.cross_entropy, label_smoothing=0.1), ""),
        (nn.CrossEntropyLoss(label_smoothing=0.1), ""),
        (recording, "calls append"),
        (OwnLoss(), "the loss is a module"),
    ],
)
def test_why_a_loss_stays(loss: Callable[..., Any], why: str) -> None:
    reason = why_not_loss(loss)
    assert why in reason
    assert bool(reason) is bool(why)

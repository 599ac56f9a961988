"""Updates that forks make: of every optimizer, with what users change of it, and where a process ends meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import hfusion as hf
from hfusion.population.plain_member import PlainMember
from tests.population.test_spread_members import Dense, Tied, at_once, batch, forks, population, same

__all__ = ["at_once"]

OPTIMIZERS: dict[str, Callable[[Any], hf.optim.FusedOptimizer]] = {
    "SGD": lambda p: hf.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: hf.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: hf.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "NAdam": lambda p: hf.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: hf.optim.RAdam(p, lr=0.01),
    "Adagrad": lambda p: hf.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: hf.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: hf.optim.Adamax(p, lr=0.01),
    "RMSprop": lambda p: hf.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Lion": lambda p: hf.optim.Lion(p, lr=0.01),
}


def models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Dense(3), Dense(4), Tied(5), Dense(6), Tied(3)]


def lived(processes: int, change: Callable[[hf.Population, int], object], **options: Any) -> tuple[hf.Population, Any]:
    pop = population(processes, models(), **options)
    torch.manual_seed(1)
    losses = []
    for step in range(7):
        change(pop, step)
        losses.append(pop.step(*batch(step)))
        if pop.scheduler is not None:
            pop.scheduler.step()
    assert (forks(pop) is None) is (processes == 0)
    assert not hasattr(pop, "groups") or len(pop.groups) == 5
    states = [group.optimizer.state_dict() for group in pop._groups]
    return pop, [losses, [m.state_dict() for m in pop.models if m is not None], states, pop.ages, pop.steps]


def nothing(pop: hf.Population, step: int) -> None:
    pass


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    _, expected = lived(0, nothing, optimizer=OPTIMIZERS[name])
    _, actual = lived(3, nothing, optimizer=OPTIMIZERS[name])
    same(actual, expected)


def test_updates_are_made_where_steps_are() -> None:
    pop = population(3, [*models(), nn.Linear(4, 3), nn.Linear(4, 3)])
    for step in range(3):
        pop.step(*batch(step))
    processes = forks(pop)
    numbers = [number for share in processes.shares for number in share.numbers]
    assert len(numbers) > 1
    assert {int(processes.members[number][1].progress) for number in numbers} == {2}
    assert pop.groups[-1].kind == "array"


def rates(pop: hf.Population, step: int) -> None:
    pop.hparams["lr"][step % 5] *= 0.5
    pop.hparams["weight_decay"][:] = 0.1 * step


def betas(pop: hf.Population, step: int) -> None:
    if step == 4:
        for group in pop._groups:
            group.optimizer.param_groups[0]["betas"] = (0.5, 0.6)


def flags(pop: hf.Population, step: int) -> None:
    if step == 4:
        for group in pop._groups:
            group.optimizer.param_groups[0]["maximize"] = True


def reloaded(pop: hf.Population, step: int) -> None:
    if step == 4:
        for group in pop._groups:
            optimizer = group.optimizer
            optimizer.load_state_dict(optimizer.state_dict())


def hooked(pop: hf.Population, step: int) -> None:
    if step == 4:
        for group in pop._groups:
            group.optimizer.register_step_post_hook(halved)


def halved(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.mul_(0.5)


@pytest.mark.parametrize("change", [rates, betas, flags, reloaded, hooked])
def test_changes_of_an_optimizer(change: Callable[[hf.Population, int], object]) -> None:
    _, expected = lived(0, change)
    _, actual = lived(3, change)
    same(actual, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5)},
        {"clip_norm": [0.1, 0.2, 0.3, 0.4, 0.5], "clip_value": 0.05},
        {"clip_norm": None},
        {"on_nonfinite": "raise", "scheduler": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9)},
    ],
)
def test_schedules_and_limits(options: dict[str, Any]) -> None:
    _, expected = lived(0, nothing, **options)
    _, actual = lived(3, nothing, **options)
    same(actual, expected)


class Killed(nn.Module):
    """Its backward ends the process, if it is a fork, once there is such a file."""

    def __init__(self, parent: int) -> None:
        super().__init__()
        self.fc, self.parent = nn.Linear(4, 3), parent

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        if os.getpid() != self.parent and x.shape[0] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return y


def test_a_process_that_ends_in_a_forward() -> None:
    results = []
    for processes in (0, 3):
        torch.manual_seed(0)
        pop = population(processes, [Dense(3), Killed(os.getpid()), Dense(4), Dense(5)])
        for step in range(3):
            pop.step(*batch(step))
        x, y = batch(3)
        losses = [pop.step(x[:5], y[:5]), pop.step(x, y)]
        results.append([losses, [m.state_dict() for m in pop.models if m is not None], pop.ages])
    same(*results)


def test_a_process_that_ends_in_an_update_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, update_count, update = os.getpid(), [0], PlainMember.make_update

    def make_update(member: PlainMember) -> None:
        update_count[0] += os.getpid() != parent
        if update_count[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        update(member)

    monkeypatch.setattr(PlainMember, "make_update", make_update)
    pop = population(2, models())

    def train() -> None:
        for step in range(9):
            pop.step(*batch(step))

    with pytest.raises(hf.HFusionError, match=r"was updating 'member \d', whose weights are of no step now: load"):
        train()
    assert forks(pop) is None


class Interrupting(Dense):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 5:
            raise KeyboardInterrupt
        return super().forward(x)


def test_an_interrupt_leaves_every_member_at_a_step() -> None:
    """Each member in a worker process has either made and counted the update, or done neither."""
    pop = population(2, [*models(), Interrupting(4), Interrupting(5)])
    for step in range(3):
        pop.step(*batch(step))
    members = [(row, model) for row, model in enumerate(pop.models) if isinstance(model, Dense)]
    before = [member.get_parameter("last.bias").clone() for _, member in members]
    x, y = batch(3)
    with pytest.raises(KeyboardInterrupt):
        pop.step(x[:5], y[:5])
    assert forks(pop) is None
    for (row, member), bias in zip(members, before, strict=True):
        assert (int(pop.ages[row]) == 4) is (not torch.equal(bias, member.get_parameter("last.bias")))

"""Schedulers of tasks: each member has the rates, and becomes, what it would alone with torch's scheduler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import hfusion as hf
from tests.trained import batches, machine, planned

EPOCHS, LOADER = 4, batches(torch.float64, 3)
RATES = [0.1, 0.05, 0.2]


def step_lr(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 2, 0.5)


def warm_up(optimizer: Any) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 5)],
        [3],
    )


def cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20)


def plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)


SCHEDULES: dict[str, Any] = {
    "StepLR": step_lr,
    "SequentialLR": warm_up,
    "OneCycleLR": cycle,
    "ReduceLROnPlateau": plateau,
    "of each member": [step_lr, plateau, warm_up],
}


def models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double() for _ in RATES]


def alone(
    model: nn.Module, rate: float, make: Callable[[Any], Any], interval: str, accumulate: int, evaluated: bool
) -> tuple[list[Tensor], float]:
    """The loop that people write for one model; its parameters and last rate."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    scheduler = make(optimizer)
    takes = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    for _ in range(EPOCHS):
        losses = []
        for number, (x, y) in enumerate(LOADER, start=1):
            loss = F.cross_entropy(model(x), y)
            losses.append(loss.detach())
            (loss / accumulate).backward()
            if number % accumulate == 0 or number == len(LOADER):
                optimizer.step()
                optimizer.zero_grad()
                if interval == "step":
                    scheduler.step(loss.detach()) if takes else scheduler.step()
        if interval == "epoch":
            if evaluated:
                with torch.no_grad():
                    losses = [F.cross_entropy(model(x), y) for x, y in LOADER[:2]]
            scheduler.step(torch.stack(losses).mean()) if takes else scheduler.step()
    return [param.detach() for param in model.parameters()], optimizer.param_groups[0]["lr"]


def trained(
    name: str, interval: Any, accumulate: int, evaluated: bool, shards: int = 2, **options: Any
) -> tuple[list[list[Tensor]], list[float]]:
    optimizers: list[Any] = []

    def make(params: Any) -> Any:
        optimizers.append(hf.optim.SGD(params, lr=RATES, momentum=0.9))
        return optimizers[-1]

    task = hf.Task(
        models(),
        F.cross_entropy,
        make,
        LOADER,
        epochs=EPOCHS,
        eval_loader=LOADER[:2] if evaluated else None,
        accumulate=accumulate,
        scheduler=SCHEDULES[name],
        scheduler_interval=interval,
    )
    plan = planned([task], machine(), [shards], [shards == 1])
    report = hf.train(task, machine(), plan=plan, **options)
    members = [[param.detach() for param in model.parameters()] for model in report["task"].models]
    return members, optimizers[-1].param_groups[0]["lr"].tolist()


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_member_is_scheduled_as_alone(name: str, interval: str) -> None:
    for accumulate, evaluated in ((1, False), (2, True)):
        members, rates = trained(name, interval, accumulate, evaluated)
        for row, (model, rate) in enumerate(zip(models(), RATES, strict=True)):
            schedule = SCHEDULES[name] if callable(SCHEDULES[name]) else SCHEDULES[name][row]
            params, last = alone(model, rate, schedule, interval, accumulate, evaluated)
            assert rates[row] == pytest.approx(last, rel=1e-12)
            assert last != rate
            for param, expected in zip(members[row], params, strict=True):
                torch.testing.assert_close(param, expected, rtol=1e-12, atol=1e-12)


def test_members_of_several_arrays_have_their_own() -> None:
    torch.manual_seed(0)
    members = [(nn.Linear(6, 3) if k % 2 else nn.Sequential(nn.Linear(6, 3))).double() for k in range(3)]
    before = copy.deepcopy(members)
    makes = [step_lr, warm_up, plateau]
    task = hf.Task(
        members,
        F.cross_entropy,
        lambda params: hf.optim.SGD(params, lr=RATES, momentum=0.9),
        LOADER,
        epochs=EPOCHS,
        scheduler=makes,
    )
    after = hf.train(task, machine())["task"].models
    for model, rate, make, result in zip(before, RATES, makes, after, strict=True):
        params, _ = alone(model, rate, make, "epoch", 1, False)
        for param, expected in zip(result.parameters(), params, strict=True):
            torch.testing.assert_close(param, expected, rtol=1e-12, atol=1e-12)

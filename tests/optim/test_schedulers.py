"""Torch's own schedulers drive the vectors of an array as they drive B optimizers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as ls

from hfusion import FusionError
from tests.optim.arrays import Array, Per, run, start

MAKERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: ls.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: ls.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: ls.ConstantLR(o, 0.5, 3),
    "ExponentialLR": lambda o: ls.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: ls.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: ls.CosineAnnealingLR(o, 5, eta_min=0.01),
    "LinearLR": lambda o: ls.LinearLR(o, 0.1, total_iters=4),
    "LambdaLR": lambda o: ls.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda o: ls.MultiplicativeLR(o, lambda epoch: 0.95),
    "OneCycleLR": lambda o: ls.OneCycleLR(o, 0.5, total_steps=12),
    "CyclicLR": lambda o: ls.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: ls.CosineAnnealingWarmRestarts(o, 3),
    "ChainedScheduler": lambda o: ls.ChainedScheduler([ls.LinearLR(o, 0.1), ls.ExponentialLR(o, 0.9)], o),
    "SequentialLR": lambda o: ls.SequentialLR(o, [ls.LinearLR(o, 0.1), ls.StepLR(o, 2)], [3]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_equals_alone(make: Callable[[Any], Any], members: int, name: str) -> None:
    array = Array(members, shapes=[(3,), (2, 2)])
    options: dict[str, Any] = {"lr": Per(0.1, 0.5)} | ({"momentum": 0.9} if name == "SGD" else {})
    fused, alone = start(name, options, array)
    schedulers = [make(optimizer) for optimizer in (fused, *alone)]
    for _ in range(8):
        run(array, fused, alone, 1)
        lr = fused.param_groups[0]["lr"]
        assert lr.dtype == torch.float64
        assert lr.tolist() == pytest.approx([float(o.param_groups[0]["lr"]) for o in alone], rel=1e-12)
        for scheduler in schedulers:
            scheduler.step()
    array.assert_equal()


def test_a_schedule_per_member() -> None:
    array = Array(2, shapes=[(3,)])
    fused, _ = start("SGD", {"lr": 1.0}, array)

    def factors(epoch: int) -> Any:
        return torch.tensor([1.0, 0.5**epoch])

    scheduler = ls.LambdaLR(fused, factors)
    for _ in range(2):
        fused.step()
        scheduler.step()
    assert fused.param_groups[0]["lr"].tolist() == [1.0, 0.25]


def test_a_scheduler_resumes() -> None:
    array = Array(3, shapes=[(3,)])
    fused, _ = start("SGD", {"lr": Per(0.1, 0.5)}, array)
    scheduler = ls.CosineAnnealingLR(fused, 10)
    rates = []
    for step in range(6):
        if step == 3:
            file = io.BytesIO()
            torch.save([fused.state_dict(), scheduler.state_dict()], file)
            file.seek(0)
            saved, schedule = torch.load(file, weights_only=True)
        fused.step()
        scheduler.step()
        rates.append(fused.param_groups[0]["lr"].tolist())
    again, _ = start("SGD", {"lr": 1.0}, array)
    resumed = ls.CosineAnnealingLR(again, 10)
    resumed.load_state_dict(schedule)
    again.load_state_dict(saved)
    for step in range(3, 6):
        again.step()
        resumed.step()
        assert again.param_groups[0]["lr"].tolist() == rates[step]


def test_plateau_is_refused_in_words() -> None:
    array = Array(3, shapes=[(3,)])
    fused, _ = start("SGD", {"lr": 0.1}, array)
    scheduler = ls.ReduceLROnPlateau(fused, patience=0)
    scheduler.step(1.0)
    with pytest.raises(FusionError, match=r"one value for each of 3 members, .*ReduceLROnPlateau"):
        scheduler.step(2.0)

"""Torch's own schedulers drive the vectors of an array as they drive B optimizers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as ls
from torch.optim.swa_utils import SWALR

import hfusion as hf
from tests.optim.arrays import Array, Per, run, start


# Every scheduler of torch, as a function of an optimizer.
def has_momentum(optimizer: Any) -> bool:
    """Return True if the optimizer has a momentum that cycles along with the rate."""
    return bool({"momentum", "betas"} & optimizer.defaults.keys())


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
    "OneCycleLR": lambda o: ls.OneCycleLR(o, 0.5, total_steps=12, cycle_momentum=has_momentum(o)),
    "CyclicLR": lambda o: ls.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=has_momentum(o)),
    "CosineAnnealingWarmRestarts": lambda o: ls.CosineAnnealingWarmRestarts(o, 3),
    "ChainedScheduler": lambda o: ls.ChainedScheduler([ls.LinearLR(o, 0.1), ls.ExponentialLR(o, 0.9)], o),
    "SequentialLR": lambda o: ls.SequentialLR(o, [ls.LinearLR(o, 0.1), ls.StepLR(o, 2)], [3]),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=3),
}


# Torch's own schedulers drive the vectors of an array as they drive B optimizers.
def test_every_scheduler_of_torch_is_tried() -> None:
    kinds = {name for name, cls in vars(ls).items() if isinstance(cls, type) and issubclass(cls, ls.LRScheduler)}
    kinds = {name for name in kinds if not name.startswith("_")}
    assert kinds - {"LRScheduler", "ReduceLROnPlateau"} <= {name.partition("-")[0] for name in MAKERS}


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


METRICS = torch.rand(14, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
METRICS[5, 1] = float("nan")

PLATEAUS: dict[str, dict[str, Any]] = {
    "defaults": {"patience": 1},
    "per member": {
        "mode": ["min", "max", "min"],
        "factor": [0.5, 0.1, 0.9],
        "patience": [0, 1, 2],
        "threshold": [1e-4, 0.1, 0.0],
        "threshold_mode": ["rel", "abs", "abs"],
        "cooldown": (0, 1, 2),
        "min_lr": torch.tensor([0.0, 1e-3, 1e-2]),
        "eps": [1e-8, 1e-3, 0.0],
    },
}


def alone(options: dict[str, Any], member: int) -> dict[str, Any]:
    values = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    return {key: value[member] if isinstance(value, list | tuple) else value for key, value in values.items()}


@pytest.mark.parametrize("options", PLATEAUS.values(), ids=PLATEAUS)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_plateaus_equal_alone(options: dict[str, Any], name: str) -> None:
    array = Array(3, shapes=[(3,)])
    fused, optimizers = start(name, {"lr": Per(0.1, 0.5)}, array)
    scheduler = hf.optim.lr_scheduler.ReduceLROnPlateau(fused, **options)
    assert isinstance(scheduler, ls.ReduceLROnPlateau)
    references = [ls.ReduceLROnPlateau(o, **alone(options, member)) for member, o in enumerate(optimizers)]
    for epoch, metrics in enumerate(METRICS):
        run(array, fused, optimizers, 1)
        if epoch == 4:
            # Another hand at the learning rates, and another group.
            fused.param_groups[0]["lr"] = [0.3, 0.2, 0.1]
            for optimizer, lr in zip(optimizers, [0.3, 0.2, 0.1], strict=True):
                optimizer.param_groups[0]["lr"] = lr
        if epoch == 7:
            file = io.BytesIO()
            torch.save(scheduler.state_dict(), file)
            file.seek(0)
            scheduler = hf.optim.lr_scheduler.ReduceLROnPlateau(fused)
            scheduler.load_state_dict(torch.load(file, weights_only=True))
        scheduler.step(metrics if epoch % 2 else metrics.tolist())
        for reference, metric in zip(references, metrics, strict=True):
            reference.step(metric)
        assert fused.param_groups[0]["lr"].tolist() == [o.param_groups[0]["lr"] for o in optimizers]
        assert scheduler.get_last_lr()[0].tolist() == [reference.get_last_lr()[0] for reference in references]
        assert scheduler.in_cooldown.tolist() == [reference.in_cooldown for reference in references]
        assert scheduler.last_epoch == epoch + 1
    array.assert_equal()
    assert len(set(fused.param_groups[0]["lr"].tolist())) == 3


# Classes of torch with arguments of which torch takes one, or a list with one for each param group.
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "OneCycleLR": (ls.OneCycleLR, {"max_lr": [0.5, 0.1, 0.02], "total_steps": 12}),
    "CyclicLR": (
        ls.CyclicLR,
        {"base_lr": [0.5, 0.1, 0.02], "max_lr": torch.tensor([0.6, 0.2, 0.1]), "cycle_momentum": False},
    ),
    "MultiStepLR": (ls.MultiStepLR, {"milestones": [[1, 3], [2], [4, 5]], "gamma": (0.1, 0.5, 0.9)}),
    "a function": (lambda o, size: ls.StepLR(o, size), {"size": [1, 2, 3]}),
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_with_a_value_per_member(name: str, groups: int) -> None:
    kind, options = CLASSES[name]
    fused, optimizers = start("SGD", {"lr": Per(0.1, 0.5)}, array := Array(3, shapes=[(3,), (2,)]))
    if groups == 2:
        fused = hf.optim.SGD([{"params": [p]} for p in array.params], lr=[0.1, 0.05, 0.025])
        optimizers = [
            torch.optim.SGD([{"params": [p]} for p in ps], lr=0.1 * 0.5**m) for m, ps in enumerate(array.members)
        ]
    scheduler = hf.optim.lr_scheduler.PerMember(fused, kind, **options)
    references = [kind(o, **alone(options, member)) for member, o in enumerate(optimizers)]
    for _ in range(6):
        run(array, fused, optimizers, 1)
        scheduler.step()
        for reference in references:
            reference.step()
        for index, group in enumerate(fused.param_groups):
            assert group["lr"].tolist() == [float(o.param_groups[index]["lr"]) for o in optimizers]

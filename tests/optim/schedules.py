"""Every scheduler of torch, as a function of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler as ls
from torch.optim.swa_utils import SWALR


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
    "OneCycleLR-phases": lambda o: ls.OneCycleLR(
        o, 0.5, total_steps=12, three_phase=True, anneal_strategy="linear", cycle_momentum=has_momentum(o)
    ),
    "CyclicLR-exp": lambda o: ls.CyclicLR(
        o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9, cycle_momentum=has_momentum(o)
    ),
    "CosineAnnealingWarmRestarts-longer": lambda o: ls.CosineAnnealingWarmRestarts(o, 2, 2, eta_min=0.001),
    "SequentialLR": lambda o: ls.SequentialLR(o, [ls.LinearLR(o, 0.1), ls.StepLR(o, 2)], [3]),
    "SequentialLR-restart": lambda o: ls.SequentialLR(o, [ls.ConstantLR(o, 0.1, 2), ls.CosineAnnealingLR(o, 5)], [2]),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=3),
    "SWALR-linear": lambda o: SWALR(o, 0.05, anneal_epochs=4, anneal_strategy="linear"),
}

ALL: dict[str, Callable[[Any], Any]] = {**MAKERS, "ReduceLROnPlateau": lambda o: ls.ReduceLROnPlateau(o, patience=1)}

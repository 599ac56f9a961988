"""Cases so small that a whole comparison takes no time."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hfusion.bench import cases, models
from hfusion.bench.cases import FuseCase, Workload

CPU = torch.device("cpu")


class Branching(nn.Linear):
    """Its way hangs on values, so that nothing compiles it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else 2 * y


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 10))


TINY = FuseCase("tiny", "MLP 3-4-10", partial(models.mlp, 3, 4, 10), partial(cases.classified, 5, 3))
BATCH_NORM = FuseCase("tiny-bn", "with BatchNorm", batch_norm, partial(cases.classified, 5, 3))
IMAGES = FuseCase("tiny-images", "a convolution", images, partial(cases.classified, 5, 3, 4, 4))
BRANCHING = FuseCase("tiny-branch", "", partial(Branching, 3, 10), partial(cases.classified, 5, 3))
(ADAPTERS,) = (case for case in cases.CASES if case.make_base is not None)


def workload(case: FuseCase = TINY, members: int = 3) -> Workload:
    return Workload(case, members, CPU)

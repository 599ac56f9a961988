"""The default number of rows of a sweep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hfusion as hf
from hfusion.bench.sweep_benchmark import cnn
from hfusion.cluster.messages import DeviceInfo
from hfusion.device.calibrate import Rates
from hfusion.tune.footprint import Footprint
from hfusion.tune.plain_trial_footprint import fastest_width

# As measured on two cores of an Intel Xeon.
RATES = Rates(173e9, 11.3e9, 490e3, 7.1e9, 7.6e9, 1.1e9, 1.2e9)


def rows(make: Callable[[], nn.Module], x: torch.Tensor) -> int:
    device = DeviceInfo("cpu", torch.device("cpu"), 1 << 33, RATES, 0.0)
    models = [make(), make()]
    footprint = Footprint(models, lambda p: hf.optim.AdamW(p, lr=1e-3), x, device, evaluated=1, saved=False)
    return fastest_width(footprint.seconds, 64)


@pytest.mark.parametrize(
    ("model", "shape", "chosen"),
    [
        # Timed, a step of a member takes 1.55 ms in 2 rows, 1.24 in 8 and 1.21 in 16.
        (cnn, (64, 1, 8, 8), 8),
        # What computing takes hides all else.
        (lambda: nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)), (256, 2048), 1),
    ],
)
def test_rows_that_pay_for_what_a_step_takes_beside_its_operators(
    model: Callable[[], nn.Module], shape: tuple[int, ...], chosen: int
) -> None:
    assert rows(model, torch.randn(shape)) == chosen

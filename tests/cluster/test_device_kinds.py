"""Devices that are alike are planned for once, and never for more memory than they have."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.cluster.jobs import RunOptions, arranged
from hfusion.cluster.messages import DeviceInfo
from tests.trained import RATES

DEVICE = DeviceInfo("one", torch.device("cpu"), 1 << 20, RATES)


def test_a_device_of_a_new_kind_has_its_own_estimates() -> None:
    """As those that it would have had at the start; an array that exceeds its memory does not fit."""
    models = [nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1)) for width in (4, 128)]
    data = [(torch.zeros(2, width), torch.zeros(2, 1)) for width in (4, 128)]
    tasks = [
        hf.Task([model], F.mse_loss, lambda params: hf.optim.SGD(params, lr=0.1), [pair], name=f"{number}")
        for number, (model, pair) in enumerate(zip(models, data, strict=True))
    ]
    small, slow = replace(DEVICE, budget=40_000), replace(DEVICE, rates=replace(RATES, flops=1e7))
    options = RunOptions(None, None, "fifo")
    run = arranged(tasks, [DEVICE], options, resume=True)
    joined = [run.kind_of(device) for device in (DEVICE, small, slow, slow)]
    assert [kind for kind, _ in joined] == [0, 1, 2, 2]
    assert [seconds is None for _, seconds in joined] == [True, False, False, True]
    whole = arranged(tasks, [DEVICE, small, slow], options, resume=True)
    for kind in (1, 2):
        assert joined[kind][1] == [array.load.seconds[kind] for array in whole.arrays]
    first, second = joined[1][1] or []
    assert first is not None
    assert second is None
    assert all(a < b for a, b in pairwise([run.arrays[0].load.seconds[0] or 0, (joined[2][1] or [0])[0] or 0]))

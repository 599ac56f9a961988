"""From tasks to the arrays that are sent to devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.cluster.jobs import RunOptions, arranged
from hfusion.cluster.messages import DeviceInfo
from hfusion.core.text import file_name
from tests.trained import RATES


@pytest.mark.parametrize("name", ["..", "a/b", ".hidden"])
def test_a_save_stays_in_the_folder(name: str, tmp_path: Path) -> None:
    task = hf.Task([nn.Linear(2, 1)], F.mse_loss, hf.optim.SGD, [(torch.zeros(1, 2), torch.zeros(1, 1))], name=name)
    device = DeviceInfo("one", torch.device("cpu"), 1 << 30, RATES, 0.0)
    (one,) = arranged([task], [device], RunOptions(tmp_path, None, "fifo"), resume=True).arrays
    assert one.options.checkpoint is not None
    assert (one.options.checkpoint / file_name(one.load.name)).resolve().parent == tmp_path.resolve()

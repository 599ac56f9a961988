"""Programs are compiled when calls first need them, and the cause of many of them is reported."""

from __future__ import annotations

import pytest
import torch

import hfusion as hf
from tests.alone import net, normal


def test_a_number_of_many_values_is_reported() -> None:
    powered = net(lambda self, x, power: self.fc(x) ** power)
    models = [powered(), powered()]
    array, x = hf.fuse(models, verify=False), normal(3, 4).abs()
    for value in range(1, 16):
        torch.testing.assert_close(array(x, value), torch.stack([model(x, value) for model in models]))
    with pytest.warns(UserWarning, match=r"16 values of a number, now \[16\].* such as torch.tensor\(16\)"):
        array(x, 16)
    array(x, 17)
    for value in torch.arange(20):
        torch.testing.assert_close(array(x, value), torch.stack([model(x, value) for model in models]))

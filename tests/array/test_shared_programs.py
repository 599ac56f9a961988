"""Programs that arrays share: only where members read the same, and are called in the same way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.array import shared_programs
from hfusion.array.module import FusedModule
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import Compiled

SCALE = 1.0


@pytest.fixture(autouse=True)
def none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_programs, "_programs", OrderedDict())


class Net(nn.Module):
    def __init__(self, width: int = 5, slope: float = 0.1, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)
        self.drop, self.slope, self.function = nn.Dropout(0.0), slope, function

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        hidden = self.drop(F.leaky_relu(self.first(x), self.slope))
        y = self.last(self.function(hidden)) * SCALE
        return y * 2 if twice else y


def array(make: Callable[[], nn.Module] = Net, members: int = 2) -> FusedModule:
    fused = hf.fuse([make() for _ in range(members)])
    fused.planned_for(torch.device("cpu"))
    shared_programs.share_programs(fused)
    return fused


def program(fused: FusedModule, *args: Any, **kwargs: Any) -> Compiled:
    arguments = Arguments.of(args or (torch.randn(4, 3),), kwargs)
    compiled = fused.compiled(arguments)
    shared_programs.check_once(fused, compiled, arguments)
    return compiled


def assert_right(fused: FusedModule) -> None:
    x = torch.randn(4, 3)
    expected = torch.stack([model(x) for model in fused.unfuse()])
    torch.testing.assert_close(fused(x), expected)


def test_arrays_of_models_that_read_the_same_share_one_program_and_its_check() -> None:
    first, second = array(), array()
    assert program(first) is program(second)
    assert first.report().parts[0].check == second.report().parts[0].check
    assert second.report().parts[0].check.startswith("self-check passed")
    assert_right(first)
    assert_right(second)

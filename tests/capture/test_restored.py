"""What a trial run of forward changes comes back, and what others change meanwhile stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hfusion.capture.python_state import restored, variables

OWN: dict[str, int] = {}
HELPERS: list[int] = []
OTHERS: dict[str, int] = {}


def help_out(x: Tensor) -> Tensor:
    HELPERS.append(len(HELPERS))
    return x


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        global MADE
        MADE = 1
        OWN["calls"] = OWN.get("calls", 0) + 1
        Counting.calls += 1
        self.last: Any = x
        return help_out(x)


def test_what_forward_names_comes_back() -> None:
    module = Counting()
    before = variables(module)
    with restored(module):
        module(torch.zeros(1))
        OTHERS["elsewhere"] = 1
        assert variables(module) != before
    assert (OWN, HELPERS, Counting.calls) == ({}, [], 0)
    assert "MADE" not in globals()
    assert not hasattr(module, "last")
    assert OTHERS == {"elsewhere": 1}
    assert variables(module) == before

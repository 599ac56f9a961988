"""The seed that torch keeps for an unused accelerator remains the one that the user set."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import hfusion as hf
from hfusion.torch_private.seeding import waiting_seeds_kept


def waiting() -> Any:
    return torch.cuda._lazy_seed_tracker.get_calls()[-1][0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CUDA that was not used")
@pytest.mark.parametrize("others", [False, True])
def test_arrays_leave_the_seed_of_an_accelerator_that_was_not_used(others: bool) -> None:
    """A capture runs forward under a separate seed, and build under the members' seeds."""
    with ThreadPoolExecutor(1) as pool:
        if others:
            pool.submit(torch.get_rng_state).result()
        torch.manual_seed(7)
        pending, drawn = waiting(), torch.get_rng_state()
        fused = hf.build(lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), seeds=[1, 2])
        assert waiting() is pending
        assert torch.equal(torch.get_rng_state(), drawn)
        fused(torch.ones(4, 3))
        assert waiting() is pending


class Device:
    """As much of `torch.cuda` as is asked: seeds wait until it is used."""

    def __init__(self) -> None:
        self.used: list[int] = []
        self._lazy_seed_tracker = type(torch.cuda._lazy_seed_tracker)()

    def seed(self, seed: int) -> None:
        if self.used:
            self.used.append(seed)
        else:
            self._lazy_seed_tracker.queue_seed_all(lambda: self.used.append(seed), [])

    def is_initialized(self) -> bool:
        return bool(self.used)


def test_a_device_that_is_first_used_inside_gets_the_users_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    for name in ("cuda", "xpu", "mtia"):
        monkeypatch.setattr(torch, name, device)
    device.seed(7)
    with waiting_seeds_kept():
        device.seed(1)
        for call in filter(None, device._lazy_seed_tracker.get_calls()):
            call[0]()
    assert device.used[-1] == 7

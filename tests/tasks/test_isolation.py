"""A fault in one member of a task changes no other by one bit: in shards, spilled, clipped, accumulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import hfusion as hf
from tests.tasks.resumed import array
from tests.tasks.test_stopping import assert_equal, rows
from tests.trained import MEMBERS, RATE, Way, batches, machine, planned, task

BAD = 1
WAYS = {
    "SGD": Way(lambda params: hf.optim.SGD(params, lr=RATE, momentum=0.9)),
    "AdamW clipped": Way(lambda params: hf.optim.AdamW(params, lr=RATE), 0.5),
    "Adam clipped accumulated": Way(lambda params: hf.optim.Adam(params, lr=RATE), [0.1, 0.5, 2.0], 2),
}


@dataclass(frozen=True)
class Harm:
    """The fault of one member: a number in its third minibatch, or another learning rate."""

    value: float | None = None
    rate: float = RATE[BAD]

    def inputs(self, x: Tensor, index: int) -> Tensor:
        x = x.clone()
        if index == 2 and self.value is not None:
            x[0, 0] = self.value
        return x


HARMS = {
    "NaN": Harm(float("nan")),
    "inf": Harm(float("inf")),
    "overflow": Harm(1e300),
    "explosion": Harm(rate=1e200),
}


def trained(settings: Way, mode: str, harm: Harm) -> list[Any]:
    """Losses and everything else of each member."""
    fused = array(0)
    loader = [
        (hf.stacked([harm.inputs(x, index) if member == BAD else x for member in range(MEMBERS)]), y)
        for index, (x, y) in enumerate(batches(torch.float64))
    ]
    optimizer = settings.optimizer(list(fused.parameters()))
    optimizer.param_groups[0]["lr"][BAD] = harm.rate
    hf_task = task(
        fused, Way(lambda params: optimizer, settings.clip, settings.accumulate), loader, eval_loader=loader[:2]
    )
    plan = planned([hf_task], machine(), [4], [mode == "resident"], [mode == "kept"])
    report = hf.train(hf_task, machine(), plan=plan)["task"]
    assert report.eval_losses is not None
    losses = torch.cat([report.losses, report.eval_losses.flatten(0, 1)])
    return [[losses[:, member], rows(fused, optimizer, member)] for member in range(MEMBERS)]


@pytest.mark.parametrize("mode", ["resident", "spilled", "kept"])
@pytest.mark.parametrize("name", WAYS)
def test_a_member_that_diverges_changes_no_other(name: str, mode: str) -> None:
    expected = trained(WAYS[name], mode, Harm())
    for harm in HARMS.values():
        actual = trained(WAYS[name], mode, harm)
        for member in range(MEMBERS):
            if member != BAD:
                assert_equal(actual[member], expected[member])
            else:
                assert not torch.equal(actual[member][0], expected[member][0])

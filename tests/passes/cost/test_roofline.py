"""The cost of work depends on the machine, the lowering, and whether it runs forward or backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import hfusion as hf
from hfusion.core.layout import Layout
from hfusion.device.calibrate import ComputeRates, Rates
from hfusion.ops import RULES
from hfusion.ops.lowering import Efficiency, Lowering
from hfusion.passes.cost.cost import line
from hfusion.passes.cost.price import Model
from hfusion.passes.cost.roofline import Seconds, Work, seconds
from hfusion.passes.layouts import choose

RATES = ComputeRates(flops=100.0, memory=10.0, calls=1.0)
HALF = Lowering(torch.add, Layout.STACKED, "", Efficiency(calls=3, arithmetic=0.5, traffic=0.25))
ON_GPU = Lowering(torch.add, Layout.STACKED, "", Efficiency(calls=3, gpu=Efficiency(calls=6, arithmetic=0.5)))

WORK = Work(calls=2, flops=50, products=2, more=0, traffic=5, tracked=True)


@pytest.mark.parametrize(
    ("work", "rates", "expected"),
    [
        # Calls: a third of 2 * 3 forward. Products: 50 of 50/s. Traffic: 5 of 2.5/s.
        (WORK, RATES, Seconds(2 + 1 + 2, 4 + 2 + 4)),
        (replace(WORK, tracked=False), RATES, Seconds(2 + 1 + 2, 0)),
        (replace(WORK, more=150), RATES, Seconds(2 + 1 + 2 + 1, 4 + 2 + 4 + 2)),
        (replace(WORK, view=True), RATES, Seconds(2 / 3, 4 / 3)),
        (replace(WORK, dtype=torch.bfloat16), replace(RATES, bfloat16=1000.0), Seconds(2 + 0.1 + 2, 4 + 0.2 + 4)),
        (replace(WORK, dtype=torch.float16), replace(RATES, bfloat16=1000.0), Seconds(2 + 1 + 2, 4 + 2 + 4)),
        # Further operations are not products.
        (
            replace(WORK, more=150, dtype=torch.bfloat16),
            replace(RATES, bfloat16=1000.0),
            Seconds(2 + 0.1 + 2 + 1, 4 + 0.2 + 4 + 2),
        ),
        # The shares are those of a CPU. An accelerator has its own.
        (WORK, replace(RATES, device="cuda"), Seconds(8 / 3 + 0.5 + 0.5, 16 / 3 + 1 + 1)),
    ],
)
def test_seconds(work: Work, rates: ComputeRates, expected: Seconds) -> None:
    assert seconds(HALF, work, rates) == pytest.approx(expected)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def test_planning_asks_what_choosing_asks() -> None:
    """The seconds of a planned program are those by which its lowerings were chosen."""
    fused = hf.fuse([mlp() for _ in range(3)], verify=False)
    fused(torch.randn(5, 6))
    program = fused.report().parts[0].program
    rates = Rates(1e9, 1e8, 1e4, 1.0, 1.0, 1.0, 1.0)
    graph = next(node.meta["origin"].graph for node in program.module.graph.nodes if "choice" in node.meta)
    chosen = choose(graph, program.layouts, 3, RULES, Model.of(graph, 3, rates))
    priced = sum(choice.price.seconds for choice in chosen.values())
    assert sum(step.forward + step.backward for step in line(program, 5, rates).steps) == pytest.approx(priced)


def test_an_accelerator_has_efficiencies_of_its_own() -> None:
    # Calls: a third of 2 * 6 forward. Products: 50 of 50/s. Traffic: 5 of 10/s.
    expected = Seconds(4 + 1 + 0.5, 8 + 2 + 1)
    assert seconds(ON_GPU, WORK, replace(RATES, device="cuda")) == pytest.approx(expected)

"""Fits of the share of a device's rates that each kind of lowering reaches, from the times of layers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hfusion.core.layout import Layout
from hfusion.device import layer_times
from hfusion.device.calibrate import ComputeRates
from hfusion.device.layer_times import KINDS, KindFit, LayerSizes, fitted, measure, timed_layers
from hfusion.ops.lowering import Efficiency, Lowering
from hfusion.passes.cost.roofline import Work, seconds

RATES = ComputeRates(flops=2e13, memory=1e12, calls=1e5, device="cuda")
TINY = {"small": LayerSizes(2, 1, 1, 3, 2, 3), "large": LayerSizes(2, 2, 4, 5, 16, 1)}
KNOWN = {kind: KindFit(calls=3.0 + number, arithmetic=0.5 * number + 0.25) for number, kind in enumerate(KINDS)}


def estimated(fits: dict[str, KindFit]) -> dict[str, float]:
    """Return how often per second layers run by the estimates of the cost model."""
    rates, frequencies = ComputeRates(RATES.flops, RATES.memory, RATES.calls, device="cuda", kinds=fits), {}
    for name, layer in timed_layers().items():
        kind, _, _ = name.rpartition(", ")
        lowering = Lowering(torch.add, Layout.STACKED, "", Efficiency(gpu=Efficiency(kind=kind)))
        # A third of operations and traffic is forward.
        work = Work(layer.calls, layer.flops / 3, 2, 0, layer.traffic / 3, tracked=True)
        frequencies[name] = 1 / seconds(lowering, work, rates).total
    return frequencies


def fit(measured: dict[str, float]) -> dict[str, KindFit]:
    return fitted(measured, RATES.flops, RATES.memory, RATES.calls)


def test_times_by_the_estimate_give_its_numbers() -> None:
    fits = fit(estimated(KNOWN))
    assert {kind: pytest.approx(kind_fit) for kind, kind_fit in KNOWN.items()} == fits


def test_absurd_times_give_plausible_numbers() -> None:
    for large in (1.0, 1e12):
        for small in (1.0, 1e12):
            times = {name: small if name.endswith("small") else large for name in timed_layers()}
            for calls, share in fit(times).values():
                assert layer_times.CALLS[0] <= calls <= layer_times.CALLS[1]
                assert layer_times.SHARES[0] <= share <= layer_times.SHARES[1]


def test_all_layers_run() -> None:
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        measured = measure(torch.device("cpu"), TINY)
        assert torch.equal(torch.get_rng_state(), state)
    assert measured.keys() == timed_layers().keys()
    assert all(1 <= rate < 1e9 for rate in measured.values())


@pytest.mark.parametrize("name", timed_layers(TINY))
def test_operations_are_those_that_torch_counts(name: str) -> None:
    layer = timed_layers(TINY)[name]
    # torch counts the backward of grouped convolutions once for each group.
    with FlopCounterMode(display=False) as counter:
        layer.run(*map(torch.ones, layer.shapes))
    assert 3 * counter.get_total_flops() == layer.flops

"""On a GPU the estimates choose what was fastest on an H200, by the times that `contact` wrote there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hfusion.core.layout import Layout
from hfusion.device.calibrate import ComputeRates
from hfusion.device.layer_times import CONVOLUTIONS, KINDS, PRODUCTS, KindFit
from hfusion.ops import RULES
from hfusion.passes.cost.price import Model
from hfusion.passes.layouts import Choice, choose

aten = torch.ops.aten

LINES = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "contact-h200.json"
MEMBERS = 16
# From the estimates in the file, all of which were made of these rates alone.
H200 = ComputeRates(flops=73e12, memory=4.2e12, calls=71e3, device="cuda")
# Milliseconds of each measured call that are none of the operator's, and by what factor an estimate may be off.
FIXED, FACTOR = 0.2, 3.0


def convolution(channels: int, size: int, kernel: int = 3, groups: int = 1) -> tuple[Any, ...]:
    shapes = [(32, channels, size, size), (channels, channels // groups, kernel, kernel), (channels,)]
    pad = kernel // 2
    return aten.conv2d.default, shapes, (32, channels, size, size), ([1, 1], [pad, pad], [1, 1], groups)


LAYERS: dict[str, tuple[Any, ...]] = {
    "conv3-16x32x32": convolution(16, 32),
    "conv3-64x16x16": convolution(64, 16),
    "conv3-256x8x8": convolution(256, 8),
    "conv1-64x16x16": convolution(64, 16, kernel=1),
    "depthwise-64x16x16": convolution(64, 16, groups=64),
    "linear-64": (aten.linear.default, [(32, 64), (64, 64), (64,)], (32, 64), ()),
    "linear-1024": (aten.linear.default, [(128, 1024), (1024, 1024), (1024,)], (128, 1024), ()),
}


def chosen(name: str, members: int = MEMBERS, rates: ComputeRates = H200) -> Choice:
    """Choose a layer's lowering for stacked inputs."""
    target, shapes, result, options = LAYERS[name]
    graph = fx.Graph()
    operands = [graph.placeholder(f"operand{index}") for index in range(len(shapes))]
    node = graph.call_function(target, (*operands, *options))
    graph.output((node,))
    with FakeTensorMode():
        for operand, shape in zip(operands, shapes, strict=True):
            operand.meta["val"] = torch.empty(shape, device="cuda", requires_grad=operand is not operands[0])
        node.meta["val"] = torch.empty(result, device="cuda")
    layouts = [Layout.STACKED] * len(operands)
    return choose(graph, layouts, members, RULES, Model.of(graph, members, rates))[node]


def measured(name: str) -> dict[str, Any]:
    """Return the line of the layer's only operator."""
    lines = map(json.loads, LINES.read_text().splitlines())
    (operator,) = next(line for line in lines if line["item"] == f"lowering {name}")["values"]["operators"]
    return operator  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LAYERS)
def test_the_fastest_is_chosen(name: str) -> None:
    line, choice = measured(name), chosen(name)
    assert line["measured ms"] < min(line["others ms"].values())
    assert {str(lowering) for lowering, _ in choice.lost} == line["others ms"].keys()


@pytest.mark.parametrize("name", LAYERS)
def test_estimates_are_of_the_size_of_the_times(name: str) -> None:
    line, choice = measured(name), chosen(name)
    pairs = [(choice.price.estimate, line["measured ms"])]
    pairs += [(price.estimate, line["others ms"][str(lowering)]) for lowering, price in choice.lost]
    for estimate, milliseconds in pairs:
        assert 1 / FACTOR < (1e3 * estimate + FIXED) / milliseconds < FACTOR


@pytest.mark.parametrize("name", LAYERS)
def test_two_members_take_one_call(name: str) -> None:
    assert "loop over members" in {str(lowering) for lowering, _ in chosen(name, members=2).lost}


@pytest.mark.parametrize("name", LAYERS)
def test_loops_are_chosen_if_measured_to_be_faster(name: str) -> None:
    measured = dict.fromkeys(KINDS, KindFit(calls=1000.0, arithmetic=0.1))
    measured |= dict.fromkeys((CONVOLUTIONS, PRODUCTS), KindFit(calls=1.0, arithmetic=1.0))
    lost = {str(lowering) for lowering, _ in chosen(name, rates=replace(H200, kinds=measured)).lost}
    assert not any("loop" in text for text in lost)

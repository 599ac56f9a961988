"""Prices of single operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hfusion.core.layout import Layout
from hfusion.device.calibrate import ComputeRates
from hfusion.ops import RULES
from hfusion.passes.cost.price import Model
from hfusion.passes.layouts import choose

aten = torch.ops.aten

MEMBERS = 4


def convolution(device: str, samples: int, channels: int, size: int, of: Layout) -> str:
    """How a 3x3 convolution of an input in the layout ``of`` is chosen to run."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    y = graph.call_function(aten.conv2d.default, (x, weight, None, [1, 1], [1, 1]))
    # What leaves the array is small, so that its layout counts little.
    mean = graph.call_function(aten.mean.dim, (y, [2, 3]))
    graph.output((mean,))
    with FakeTensorMode():
        mean.meta["val"] = torch.empty(samples, channels, device=device)
        x.meta["val"] = torch.empty(samples, channels, size, size, device=device)
        weight.meta["val"] = torch.empty(channels, channels, 3, 3, device=device, requires_grad=True)
        y.meta["val"] = torch.empty(samples, channels, size, size, device=device)
    choice = choose(graph, [of, Layout.STACKED], MEMBERS, RULES, Model.of(graph, MEMBERS))[y]
    return ["grouped", "loop"][choice.index]


@pytest.mark.parametrize(
    ("device", "samples", "channels", "size", "of", "how"),
    [
        ("cpu", 8, 16, 8, Layout.PACKED, "grouped"),
        ("cpu", 32, 32, 7, Layout.PACKED, "grouped"),
        ("cpu", 32, 16, 32, Layout.LISTED, "loop"),
        ("cpu", 8, 16, 8, Layout.LISTED, "grouped"),
        ("cuda", 8, 16, 8, Layout.STACKED, "grouped"),
        ("cuda", 32, 16, 32, Layout.STACKED, "grouped"),
        ("cuda", 32, 16, 32, Layout.PACKED, "grouped"),
    ],
)
def test_large_images_loop_on_a_cpu(device: str, samples: int, channels: int, size: int, of: Layout, how: str) -> None:
    assert convolution(device, samples, channels, size, of) == how


def _product_seconds(dtype: torch.dtype, rates: ComputeRates) -> float:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    y = graph.call_function(aten.linear.default, (x, weight))
    graph.output((y,))
    with FakeTensorMode():
        for node, shape in ((x, (256, 512)), (weight, (512, 512)), (y, (256, 512))):
            node.meta["val"] = torch.empty(shape, dtype=dtype)
    choices = choose(graph, [Layout.STACKED] * 2, MEMBERS, RULES, Model.of(graph, MEMBERS, rates))
    return choices[y].price.estimate


def test_products_in_half_precision_are_estimated_by_their_own_rate() -> None:
    # So slow that nothing but products takes time.
    rates = ComputeRates(flops=1e3, memory=1e15, calls=1e15, bfloat16=8e3, float16=4e3)
    whole = _product_seconds(torch.float32, rates)
    assert _product_seconds(torch.bfloat16, rates) == pytest.approx(whole / 8)
    assert _product_seconds(torch.float16, rates) == pytest.approx(whole / 4)
    assert _product_seconds(torch.bfloat16, replace(rates, bfloat16=None)) == pytest.approx(whole)


def test_autocast_says_by_which_rate() -> None:
    rates = ComputeRates(flops=1e3, memory=1e15, calls=1e15, bfloat16=8e3)
    whole, double = _product_seconds(torch.float32, rates), _product_seconds(torch.float64, rates)
    with torch.autocast("cpu", torch.bfloat16):
        assert _product_seconds(torch.float32, rates) == pytest.approx(whole / 8)
        # Autocast leaves it.
        assert _product_seconds(torch.float64, rates) == double


def test_estimates_grow_with_members() -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    y = graph.call_function(aten.linear.default, (x, weight))
    graph.output((y,))
    for node, shape in ((x, (8, 16)), (weight, (4, 16)), (y, (8, 4))):
        node.meta["val"] = torch.zeros(shape)
    layouts = [Layout.STACKED, Layout.STACKED]
    choices = [choose(graph, layouts, members, RULES, Model.of(graph, members))[y] for members in (2, 20)]
    assert choices[0].price.estimate < choices[1].price.estimate
    assert all(choice.price.measured is None for choice in choices)

"""What the price model says of one operator alone."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hfusion.core.layout import Layout
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
    return ["grouped", "loop"][choice.place]


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


def test_estimates_grow_with_members() -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    y = graph.call_function(aten.linear.default, (x, weight))
    graph.output((y,))
    for node, shape in ((x, (8, 16)), (weight, (4, 16)), (y, (8, 4))):
        node.meta["val"] = torch.zeros(shape)
    layouts = [Layout.STACKED, Layout.STACKED]
    found = [choose(graph, layouts, members, RULES, Model.of(graph, members))[y] for members in (2, 20)]
    assert found[0].price.estimate < found[1].price.estimate
    assert all(choice.price.measured is None for choice in found)

"""The chosen layouts and lowerings cost least."""

from __future__ import annotations

import itertools
import json
import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hfusion.core.layout import Conversion, Layout
from hfusion.device.calibrate import ComputeRates
from hfusion.ops import RULES
from hfusion.ops.lowering import Lowering
from hfusion.ops.rule import Call, RuleTable, Site, Value, values
from hfusion.ops.saved import FACTORS
from hfusion.passes.candidates import Result, candidates, conversion, operands, reached, result
from hfusion.passes.cost.cost import saves
from hfusion.passes.cost.price import Model
from hfusion.passes.layouts import Choice, choose

# The chosen layouts cost least: against all choices of small graphs, and in networks as people write them.
aten = torch.ops.aten

MEMBERS = 3


def anywhere(site: Site, **arguments: Any) -> tuple[Call, ...]:
    """A rule that computes in every layout, and once more in that of its first operand."""
    calls = [
        site.call(operator.add, tuple(v.to(layout) for v in values(arguments)), layout, layout.value)
        for layout in (Layout.STACKED, Layout.PACKED, Layout.LISTED)
    ]
    first, *rest = values(arguments)
    first_layout = Layout.STACKED if first.shared else first.layout
    return (
        *calls,
        site.call(operator.add, (first, *(v.to(first_layout) for v in rest)), first_layout, "as it is", loops=True),
    )


ANYWHERE: RuleTable = {aten.add.Tensor: anywhere}


@dataclass(frozen=True)
class Random:
    """Prices without reason."""

    seed: int

    def call(self, node: fx.Node, call: Call) -> float:
        operand_layouts = [(o.value.node.name, o.value.layout.value, o.layout.value) for o in operands(call.args)]
        return random.Random(f"{self.seed} {node.name} {call.layout} {call.lowering.loops} {operand_layouts}").random()

    def move(self, value: Value, convert: Conversion) -> float:
        return random.Random(f"{self.seed} {value.node.name} {convert.__name__}").random()


def graph_of(pairs: Sequence[tuple[int, int]], ends: int) -> fx.Graph:
    """Two inputs and a sum for every pair, of any values before it; the last ``ends`` values are the result."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    for a, b in pairs:
        nodes.append(graph.call_function(aten.add.Tensor, (nodes[a % len(nodes)], nodes[b % len(nodes)])))
    for node in nodes:
        node.meta["val"] = torch.zeros(2, 2)
    graph.output(tuple(nodes[-ends:]))
    return graph


def cost(graph: fx.Graph, layouts: Sequence[Layout], price: Random, places: Mapping[fx.Node, int]) -> float:
    """Return the total cost of a choice, counting every conversion once."""
    env: dict[fx.Node, Result] = {}
    waiting, total = iter(layouts), 0.0
    paid: set[tuple[fx.Node, Layout]] = set()

    def converted(value: Value, layout: Layout) -> float:
        convert = conversion(value, layout)
        if convert is None or (value.node, layout) in paid:
            return 0.0
        paid.add((value.node, layout))
        return price.move(value, convert)

    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = result(node, next(waiting), node.meta["val"])
        elif node.op == "call_function":
            call = candidates(node, env, MEMBERS, ANYWHERE)[places[node]]
            total += price.call(node, call)
            total += sum(converted(o.value, reached(o)) for o in operands(call.args))
            env[node] = result(node, call.layout, node.meta["val"])
        else:
            total += sum(converted(v, Layout.STACKED) for n in node.all_input_nodes if isinstance(v := env[n], Value))
    return total


def every_choice(graph: fx.Graph) -> Iterator[dict[fx.Node, int]]:
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for places in itertools.product(range(4), repeat=len(calls)):
        yield dict(zip(calls, places, strict=True))


def places(choices: Mapping[fx.Node, Choice]) -> dict[fx.Node, int]:
    return {node: choice.index for node, choice in choices.items()}


PAIRS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4)
GIVEN = st.sampled_from([Layout.SHARED, Layout.STACKED, Layout.PACKED, Layout.LISTED])


# In the least choice a value is needed in a second layout, then in a third, and in the second again.
@example([(0, 2), (0, 3), (0, 4), (0, 5)], 2, (Layout.STACKED, Layout.STACKED), 110, 4)
@given(PAIRS, st.integers(1, 2), st.tuples(GIVEN, st.just(Layout.STACKED)), st.integers(0, 99), st.integers(1, 4))
def test_least_cost_of_all_choices(
    pairs: list[tuple[int, int]], ends: int, layouts: tuple[Layout, Layout], seed: int, width: int
) -> None:
    graph, price = graph_of(pairs, ends), Random(seed)
    every = every_choice(graph) if layouts[0] is not Layout.SHARED else _of_shared(graph, layouts)
    least = min(cost(graph, layouts, price, choice) for choice in every)
    exact = choose(graph, layouts, MEMBERS, ANYWHERE, price, width=10_000)
    beam = choose(graph, layouts, MEMBERS, ANYWHERE, price, width=width)
    assert cost(graph, layouts, price, places(exact)) == pytest.approx(least)
    assert cost(graph, layouts, price, places(beam)) >= least - 1e-9


def _of_shared(graph: fx.Graph, layouts: Sequence[Layout]) -> Iterator[dict[fx.Node, int]]:
    """As `every_choice`, where what shared values alone give has one way."""
    shared: set[fx.Node] = {node for node, layout in zip(graph.nodes, layouts, strict=False) if layout is Layout.SHARED}
    for node in graph.nodes:
        if node.op == "call_function" and shared.issuperset(node.all_input_nodes):
            shared.add(node)
    for choice in every_choice(graph):
        if all(index == 0 for node, index in choice.items() if node in shared):
            yield choice


# On a GPU the estimates choose what was fastest on an H200, by the times that `contact` wrote there.
LINES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "contact-h200.json"
MEMBERS_H200 = 16
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


def chosen(name: str, members: int = MEMBERS_H200, rates: ComputeRates = H200) -> Choice:
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
    pairs = [(choice.price, line["measured ms"])]
    pairs += [(price, line["others ms"][str(lowering)]) for lowering, price in choice.lost]
    for estimate, milliseconds in pairs:
        assert 1 / FACTOR < (1e3 * estimate + FIXED) / milliseconds < FACTOR


# Which operands autograd keeps for the backward of a product.
@pytest.mark.parametrize(
    ("with_gradients", "saved"),
    [
        ({"x", "weight"}, ["x", "weight"]),
        # A frozen weight is needed for the gradient of the input, and a frozen input for that of the weight.
        ({"x"}, ["weight"]),
        ({"weight"}, ["x"]),
        (set(), []),
    ],
)
def test_a_factor_is_kept_where_the_other_one_has_a_gradient(with_gradients: set[str], saved: list[str]) -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    product = graph.call_function(torch.matmul, (x, weight))
    product.meta["lowering"] = Lowering(torch.matmul, Layout.STACKED, "bmm", saves=FACTORS)
    tracked = {node for node in (x, weight) if node.name in with_gradients} | ({product} if with_gradients else set())
    assert [node.name for node in saves(product, tracked)] == saved

"""The chosen layouts and lowerings cost least."""

from __future__ import annotations

import itertools
import json
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.core.errors import PlanError
from hfusion.core.layout import Conversion, Layout
from hfusion.core.program import Kind, Program
from hfusion.device.calibrate import ComputeRates, Rates
from hfusion.ops import RULES
from hfusion.ops.lowering import Lowering
from hfusion.ops.rule import Call, RuleTable, Site, Value, values
from hfusion.ops.saved import FACTORS
from hfusion.passes.candidates import Result, candidates, conversion, operands, reached, result
from hfusion.passes.cost.cost import Line, OperatorCost, Storage, Weight, operators, saves
from hfusion.passes.cost.price import Model
from hfusion.passes.layouts import Choice, choose
from hfusion.passes.partition.cut_shards import Partition, _between, _seconds, choose_cuts, cut, sharding, tightest
from hfusion.passes.partition.segments import Segments
from hfusion.passes.partition.split_program import match_cuts, split
from hfusion.schedule.plan import Shard, TaskPlan

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


# Shards of a program: where it is cut, what fits, and that the parts are the program.
# Shards: the cut is the best there is, every shard fits, costs come from the shapes.
RATES = Rates(flops=1e9, memory=1e9, load=1e9, evict=1e9, read=1e9, write=1e9, calls=1e6)
HUGE = 2**50


def shards(program: Program, batch: int, budget: int, rates: Rates, optimizer_state: float = 2) -> tuple[Shard, ...]:
    return sharding(program, batch, budget, rates, optimizer_state).shards


def brute(plain: Line, budget: int, state: float) -> tuple[tuple[int, int] | None, int]:
    """(bytes at the cuts, number of shards) of the best cut, and the smallest budget, of all ways to cut."""
    count = len(plain.steps)
    best, smallest = None, None
    for number in range(count):
        for cuts in combinations(range(1, count), number):
            largest = max(need(plain, a, b, state) for a, b in pairwise((0, *cuts, count)))
            smallest = largest if smallest is None else min(smallest, largest)
            score = (sum(crossing(plain, index) for index in cuts), number + 1)
            if largest <= budget and (best is None or score < best):
                best = score
    assert smallest is not None
    return best, smallest


# Small linearised programs in numbers, and what their shards need by definition.

SIZES = st.integers(0, 9)


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Any small line: storages that skip steps, inputs, results, weights used again."""
    count = draw(st.integers(1, 6))
    steps = [OperatorCost(f"s{k}", 1.0, 2.0, draw(SIZES), draw(SIZES), draw(SIZES)) for k in range(count)]
    storages = []
    for _ in range(draw(st.integers(0, 8))):
        born = draw(st.integers(0, count - 1))
        last = draw(st.integers(born, count))
        saved = draw(st.none() | st.integers(born, min(last, count - 1)))
        storages.append(Storage(draw(SIZES), born, last, saved))
    uses = st.sets(st.integers(0, count - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    weights = draw(st.lists(st.builds(Weight, SIZES, uses, st.booleans()), max_size=4))
    return Line(tuple(steps), tuple(storages), tuple(weights))


def crossing(plain: Line, place: int) -> int:
    """Bytes alive at a cut, by definition."""
    if place in (0, len(plain.steps)):
        return 0
    return sum(s.size for s in plain.storages if s.born < place <= s.last)


def peak(plain: Line, first: int, last: int) -> int:
    """The most bytes alive while the backward of a shard runs, beside what is loaded and at its cuts, by definition."""
    end, inside = len(plain.steps), range(first, last)
    own = [s for s in plain.storages if s.born in inside]
    cut = [] if last == end else [s for s in own if s.last >= last]
    local = [s for s in plain.storages if not (s.born < first and s.last >= last)]
    found = []
    for step in inside:
        values = sum(s.size for s in local if s.born <= step <= s.last or (s in cut and s.born > step))
        saved = sum(s.size for s in own if s not in cut and s.saved is not None and s.saved <= step)
        saved += sum(plain.steps[k].saved for k in range(first, step + 1))
        earned = [w for w in plain.weights if w.trained and any(use in inside and use >= step for use in w.uses)]
        own_bytes = plain.steps[step].workspace + plain.steps[step].summed
        found.append(own_bytes + values + saved + sum(w.size for w in earned))
    owed = [w for w in plain.weights if w.trained and w.uses[0] < last <= w.uses[-1]]
    return max(found) + sum(w.size for w in owed)


def need(plain: Line, first: int, last: int, state: float, carried: bool = False) -> int:
    """Bytes of a shard, by definition."""
    used = [w for w in plain.weights if any(use in range(first, last) for use in w.uses)]
    trained = sum(w.size for w in used if w.trained)
    kept = round(trained * state) + trained * carried
    forward = workspace(plain, first, last)
    if last == len(plain.steps):
        forward += kept + activations(plain, first, last)
    cuts = crossing(plain, first) + crossing(plain, last)
    return sum(w.size for w in used) + cuts + max(kept + peak(plain, first, last), forward)


def activations(plain: Line, first: int, last: int) -> int:
    """Bytes that a shard saves for its backward beside its cuts, by definition."""
    own = [s for s in plain.storages if first <= s.born < last and s.saved is not None]
    inside = sum(s.size for s in own if s.last < last or last == len(plain.steps))
    return inside + sum(step.saved for step in plain.steps[first:last])


def workspace(plain: Line, first: int, last: int) -> int:
    """The most bytes alive while the forward of a shard runs, beside its cuts; of the last, beside what it saves."""
    end = len(plain.steps)
    own = [s for s in plain.storages if first <= s.born < last and (s.last < last or last == end)]
    beside = [s for s in own if s.saved is None] if last == end else own
    found = (sum(s.size for s in beside if s.born <= step <= s.last) for step in range(first, last))
    return max(plain.steps[step].workspace + size for step, size in zip(range(first, last), found, strict=True))


@given(lines(), st.integers(0, 150), st.sampled_from([0, 1, 2, 0.5]))
def test_the_cut_is_the_best_of_all(plain: Line, budget: int, state: float) -> None:
    segments = Segments(plain, state)
    best, smallest = brute(plain, budget, state)
    cuts = cut(segments, budget)
    assert (cuts is None) == (best is None)
    if cuts is not None:
        assert (sum(crossing(plain, index) for index in cuts), len(cuts) + 1) == best
        assert all(need(plain, a, b, state) <= budget for a, b in pairwise((0, *cuts, len(plain.steps))))
    least, first, last = tightest(segments)
    assert least == smallest == need(plain, first, last, state)
    assert cut(segments, least) is not None
    assert cut(segments, least - 1) is None


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + x)


def mlp() -> nn.Module:
    return nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(12, 12), nn.ReLU())], nn.Linear(12, 3))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *[Block(4) for _ in range(4)], nn.Flatten(), nn.Linear(144, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (mlp, lambda n: torch.randn(n, 12)),
    "cnn": (cnn, lambda n: torch.randn(n, 2, 6, 6)),
}


def program_of(make: Callable[[], nn.Module], x: Any, members: int = 3) -> Program:
    fused = hf.fuse([make() for _ in range(members)], verify=False)
    fused(x)
    return fused.report().parts[0].program


def spilled(cut_shards: tuple[Shard, ...]) -> int:
    return TaskPlan("t", cut_shards, 1, resident=False).device_bytes


def smallest_budget(program: Program, batch: int) -> int:
    with pytest.raises(PlanError) as caught:
        shards(program, batch, 1, RATES)
    match = re.search(r"would do is ([\d,]+) bytes", str(caught.value))
    assert match is not None
    return int(match[1].replace(",", ""))


@pytest.mark.parametrize("name", MODELS)
def test_shards_of_a_program(name: str) -> None:
    make, data = MODELS[name]
    program = program_of(make, data(4))
    (whole,) = shards(program, 16, HUGE, RATES)
    least, most = smallest_budget(program, 16), spilled((whole,))
    counts, alive = [], []
    for budget in (most, (most + least) // 2, (most + 3 * least) // 4, least):
        cut_shards = shards(program, 16, budget, RATES)
        assert spilled(cut_shards) <= budget
        assert [shard.first for shard in cut_shards] == [0, *(shard.last for shard in cut_shards[:-1])]
        assert cut_shards[-1].last == len(operators(program))
        assert sum(shard.forward for shard in cut_shards) == pytest.approx(whole.forward)
        assert sum(shard.backward for shard in cut_shards) == pytest.approx(whole.backward)
        counts.append(len(cut_shards))
        alive.append(sum(shard.boundary for shard in cut_shards))
    assert counts == sorted(counts)
    assert alive == sorted(alive)
    assert counts[0] == 1
    assert counts[-1] > 3


class Sequenced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x)[0])


def mixed() -> nn.Module:
    """Functions that keep their operand, their result, a mask, indices."""
    norm = (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16), nn.SiLU(), nn.Dropout(0.1))
    return nn.Sequential(*norm, nn.Linear(16, 16), nn.Tanh(), nn.MaxPool1d(2), nn.Linear(8, 4), nn.Softmax(-1))


KEEPING = MODELS | {"lstm": (Sequenced, lambda n: torch.randn(n, 9, 8)), "mixed": (mixed, lambda n: torch.randn(n, 8))}


@pytest.mark.parametrize("name", KEEPING)
def test_activations_are_what_autograd_saves(name: str) -> None:
    """Against what torch really keeps, storages counted once; the estimate may be above, not much below."""
    make, data = KEEPING[name]
    fused = hf.fuse([make() for _ in range(3)], verify=False)
    fused(data(4))
    array_storages = {t.untyped_storage().data_ptr() for t in (*fused.parameters(), *fused.buffers())}
    saved_bytes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in array_storages:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = fused(data(32))
    (program,) = (part.program for part in fused.report().parts)
    (whole,) = shards(program, 32, HUGE, RATES)
    assert result.requires_grad
    assert 0.9 * sum(saved_bytes.values()) <= whole.activations <= 1.2 * sum(saved_bytes.values())


def test_an_infeasible_budget_names_the_node_and_the_smallest_budget() -> None:
    program = program_of(lambda: nn.Sequential(nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, 4)), torch.randn(2, 4))
    with pytest.raises(PlanError) as caught:
        shards(program, 2, 1000, RATES)
    text = str(caught.value)
    assert re.search(r"program Sequential: no cut into shards fits 1,000 bytes; the smallest budget", text)
    assert re.search(r"which node linear_shared_input\w* \(linear at \S+\.py:\d+\) needs: weights \d\d,\d+", text)
    least = smallest_budget(program, 2)
    assert spilled(shards(program, 2, least, RATES)) == least
    with pytest.raises(PlanError, match="smallest budget"):
        shards(program, 2, least - 1, RATES)


# Choosing cuts: the chosen partition fits, and no other candidate takes fewer seconds.
RATES_CHOOSE_CUTS = Rates(flops=1.0, memory=9.0, load=2.0, evict=3.0, read=1.0, write=1.0, calls=1000.0)


def between(segments: Segments, cuts: Sequence[int]) -> tuple[Shard, ...]:
    return _between(segments, cuts, RATES_CHOOSE_CUTS)


def seconds(segments: Segments, partition: Partition, budget: int) -> float:
    cut_shards = between(segments, partition.cuts)
    return _seconds(cut_shards, partition.keeps_last, budget, RATES_CHOOSE_CUTS, carried=segments.carried)


@given(lines(), st.integers(0, 200), st.sampled_from([0, 2]), st.booleans(), st.booleans())
def test_the_chosen_cuts_fit_and_beat_the_fewest_bytes(
    plain: Line, budget: int, state: float, carried: bool, keep: bool
) -> None:
    segments = Segments(plain, state, carried)
    partition = choose_cuts(segments, budget, RATES_CHOOSE_CUTS, partial(between, segments), keep=keep)
    fewest = cut(segments, budget)
    if partition is None:
        assert fewest is None
        return
    cut_shards, keeps = between(segments, partition.cuts), partition.keeps_last
    plan = TaskPlan("t", cut_shards, 2, False, accumulate=1 + carried, keeps_last_shard=keeps)
    assert plan.device_bytes <= budget
    assert keep or not partition.keeps_last
    if fewest is not None:
        assert seconds(segments, partition, budget) <= seconds(segments, Partition(fewest, False), budget)


# The bytes of a run of steps as a shard: against its definition, and what is counted where.
@given(lines(), st.sampled_from([0, 1, 2, 0.5]), st.booleans())
def test_need_of_every_run(plain: Line, state: float, carried: bool) -> None:
    segments = Segments(plain, state, carried)
    for first in range(segments.count):
        runs = [*segments.starting(first)]
        assert [run.last for run in runs] == [*range(first + 1, segments.count + 1)]
        assert [segments.need(first, run) for run in runs] == [need(plain, first, r.last, state, carried) for r in runs]
        # Where a run is too large whatever its end, longer ones are not looked at.
        least = [r.weights + r.optimizer + r.peak for r in runs]
        assert all(run.floor <= min(least[k:]) for k, run in enumerate(runs))


# The program of an evaluation is cut where the training has its tensors.
class Tied(nn.Module):
    """A layer that is used first and last, a view of a weight, and dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.a(x).relu())
        x = self.drop(x @ self.b.weight.t() + self.b.bias)
        return self.a(self.c(x).relu())


def program() -> Program:
    fused = hf.fuse([Tied().eval() for _ in range(2)])
    return fused.compiled(Arguments.of((torch.rand(3, 4),), {})).program


NAMES = {f"{layer}.{kind}": f"{layer}.{kind}" for layer in "abc" for kind in ("weight", "bias")}


def match_cuts_layers(*names: str) -> frozenset[str]:
    return frozenset(key for key in NAMES if key[0] in names)


@pytest.mark.parametrize(
    "held",
    [
        [match_cuts_layers("a", "b", "c")],
        [match_cuts_layers("a", "b"), match_cuts_layers("a", "c")],
        [match_cuts_layers("a"), match_cuts_layers("b"), match_cuts_layers("c", "a")],
        [match_cuts_layers("a"), match_cuts_layers("b", "c"), frozenset(), match_cuts_layers("a")],
        [match_cuts_layers("b"), match_cuts_layers("b")],
    ],
    ids=lambda held: str(len(held)),
)
def test_every_part_uses_what_its_shard_has(held: list[frozenset[str]]) -> None:
    whole = program()
    ends = match_cuts(whole, NAMES, held)
    assert len(ends) == len(held)
    assert sorted(ends) == ends
    assert ends[-1] == len(operators(whole))
    all_held = frozenset[str]().union(*held)
    for part, shard_names in zip(split(whole, ends), held, strict=True):
        assert {slot.name for slot in part.keys if slot.kind is Kind.PARAMETER} & all_held <= shard_names


def test_another_order_is_refused() -> None:
    with pytest.raises(hf.PlanError, match=r"uses a\.\w+.* after tensors of later shards, .*hold the task whole"):
        match_cuts(program(), NAMES, [match_cuts_layers("a"), match_cuts_layers("b", "c")])

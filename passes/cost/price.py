"""A roofline model of operators and conversions, used to choose lowerings, to plan and to simulate.

    seconds = calls / rate of calls + arithmetic / rate of products + traffic / bandwidth

The rates are the machine's own (`hfusion.device.calibrate`), the shares of them that a lowering reaches its
`Efficiency`. These are fits to forward and backward of single operators, on one core with 4 and 16 members: within a
fifth of the times of convolutions, linear layers, BatchNorm and pooling of 2^12 to 2^19 elements of a member. For whole
training steps they reproduce that convolutions run best in one call up to about 2^16 elements of a member, and above
that in a channels-last loop; that a loop is worth leaving below about 2^15 elements; and that gradients are expensive
where a loop merges the dims of images or ends. On an accelerator there are efficiencies of convolutions, linear layers
and BatchNorm, from the times of layers of 16 members on one H200 (docs/benchmarks/contact-h200.json): full rates, and
fixed costs with which one call for all members is chosen from two members on. Other lowerings differ there only in
their number of calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from hfusion.core.layout import (
    Conversion,
    Layout,
    listed_to_packed,
    listed_to_stacked,
    packed_to_listed,
    shared_to_listed,
    shared_to_packed,
    shared_to_stacked,
    stacked_to_listed,
    stacked_to_packed,
)
from hfusion.core.tree import leaves
from hfusion.device.calibrate import ComputeRates, compute_rates
from hfusion.ops.lowering import PLAIN, Lowering
from hfusion.ops.rule import Call, Operand, Value, hint
from hfusion.passes.cost.flops import SymbolSizes, bytes_of, dtype_of, family, floating, flops, products, sizes_of

# A backward makes a gradient for each of two operands: of what is counted for both together, a third is forward.
FORWARD = 1 / 3

# How many times a value is read or written by a conversion: forward, backward if it has a gradient.
PASSES: Mapping[Conversion, tuple[int, int]] = {
    shared_to_stacked: (0, 2),
    shared_to_packed: (2, 2),
    shared_to_listed: (0, 2),
    stacked_to_packed: (2, 0),
    stacked_to_listed: (0, 2),
    packed_to_listed: (0, 2),
    listed_to_stacked: (2, 0),
    listed_to_packed: (2, 0),
}
# Conversions that handle every member's tensor separately.
LOOPING = frozenset({stacked_to_listed, packed_to_listed, listed_to_stacked, listed_to_packed})
# The same for images, in addition: they change their memory order, and the gradient comes in an order that the value
# before does not have; elementwise operators take 4 ns for an element of such a pair.
REORDERED = (2, 14)
REORDERING = frozenset({stacked_to_listed, listed_to_stacked, stacked_to_packed})
# From channels_last to channels_last a pixel is cut into the channels of members, or put together of them: 4 to 14
# passes in all on one core of a Xeon, over 4 to 26 MB.
PIXELS = (1, 5)
BETWEEN_PIXELS = frozenset({packed_to_listed, listed_to_packed})

# Factor on the estimated cost of packing: estimates of calls are accurate to a fifth, and a gain that is smaller than
# this error is no reason to leave a region.
CAUTION = 1.5
PACKING = frozenset({listed_to_packed, stacked_to_packed})


class Seconds(NamedTuple):
    """Seconds that an operator takes for all members."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Estimates:
    """What all operators of a graph have in common: the number of members, sizes for its symbols, the device's rates.

    ``tracked``: the values that get a gradient.
    """

    members: int
    batch: SymbolSizes
    rates: ComputeRates
    tracked: frozenset[fx.Node] | set[fx.Node]

    def operator(self, lowering: Lowering, node: fx.Node, origin: fx.Node, copies: int, traffic: float) -> Seconds:
        """Estimate the seconds of ``node`` by ``lowering``.

        Args:
            origin: the member's operator that it computes; ``node`` itself in a member's graph.
            copies: for how many members it is computed.
            traffic: bytes that the forward reads and writes; the backward moves twice as many.
        """
        rates, tracked = self.rates, node in self.tracked
        trained = [source.meta.get("val", source.meta.get("example")) for source in _tracked_inputs(node, self.tracked)]
        # Fitted to another device of its kind.
        efficiency = lowering.efficiency if rates.device == "cpu" else lowering.efficiency.gpu or PLAIN
        speed = rates.flops_of(dtype_of(origin)) * efficiency.arithmetic
        # Operations besides those of products count as those of float32.
        more = 0.0 if efficiency.more is None else copies * efficiency.more(sizes_of(origin, self.batch))
        calls = (self.members if lowering.loops else 1) * efficiency.calls
        either = _split(calls / rates.calls + more / (rates.flops * efficiency.arithmetic), tracked)
        arithmetic = copies * flops(origin, self.batch) / speed
        moving = traffic / (rates.memory * efficiency.traffic)
        backward = arithmetic * products(origin, trained) + 2 * moving if tracked else 0.0
        return Seconds(either.forward + arithmetic + moving, either.backward + backward)

    def views(self, calls: int, tracked: bool) -> Seconds:
        """Estimate the seconds of ``calls`` views, each of which takes one call from Python."""
        return _split(calls / self.rates.calls, tracked)

    def passes(self, calls: int, passes: tuple[int, int], size: int, tracked: bool) -> Seconds:
        """Estimate the seconds of ``calls`` views and of ``passes`` (forward, backward) over ``size`` bytes."""
        either = self.views(calls, tracked)
        backward = passes[1] * size / self.rates.memory if tracked else 0.0
        return Seconds(either.forward + passes[0] * size / self.rates.memory, either.backward + backward)

    def conversion(self, convert: Conversion, size: int, *, tracked: bool, image: bool) -> Seconds:
        """Estimate the seconds to convert a value of ``size`` bytes, of all members, to another layout."""
        forward, backward = PASSES.get(convert, (0, 0))
        if image and reorders(self.rates):
            more = REORDERED if convert in REORDERING else PIXELS if convert in BETWEEN_PIXELS else (0, 0)
            forward, backward = forward + more[0], backward + more[1]
        return self.passes(1 + (self.members if convert in LOOPING else 0), (forward, backward), size, tracked)


def reorders(rates: ComputeRates) -> bool:
    """True if convolutions prefer channels-last on the device."""
    return rates.device == "cpu"


def gets_gradient(node: fx.Node, example: Any, tracked: frozenset[fx.Node] | set[fx.Node]) -> bool:
    """Return whether the value of a call gets a gradient. ``tracked``: the values before it that do."""
    operator = family(node.meta.get("origin", node))
    return operator != "detach" and floating(example) and bool(_tracked_inputs(node, tracked))


def _tracked_inputs(node: fx.Node, tracked: frozenset[fx.Node] | set[fx.Node]) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if source in tracked]


def _split(total: float, tracked: bool) -> Seconds:
    return Seconds(total * FORWARD, total * (1 - FORWARD) if tracked else 0.0)


@dataclass(frozen=True)
class Model:
    """The prices of the candidates for one member's graph, from shapes alone; ``bytes`` of its values."""

    device: torch.device
    estimates: Estimates
    bytes: Mapping[fx.Node, int]

    @staticmethod
    def of(graph: fx.Graph, members: int, rates: ComputeRates | None = None) -> Model:
        """Return the model of ``graph``. ``rates``: by default those of the graph's device on this machine."""
        examples = {node: node.meta.get("val") for node in graph.nodes}
        batch = next(filter(None, map(_varying, examples.values())), 1)
        sizes = {node: bytes_of(example, batch) for node, example in examples.items()}
        devices = [example.device for example in examples.values() if isinstance(example, Tensor)]
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        tracked: set[fx.Node] = set()
        for node, example in examples.items():
            if node.op == "placeholder":
                held = isinstance(example, Tensor) and example.requires_grad
            else:
                held = gets_gradient(node, example, tracked)
            tracked |= {node} if held else set()
        return Model(device, Estimates(members, batch, rates or compute_rates(device), frozenset(tracked)), sizes)

    def call(self, node: fx.Node, call: Call) -> float:
        """Return the seconds of a candidate, backward included."""
        if call.layout is Layout.SHARED:
            return 0.0
        members = self.estimates.members
        if call.lowering.view.likely:
            views = self.estimates.views(members if call.lowering.loops else 1, node in self.estimates.tracked)
            # Channels-last makes a view that merges the dims of an image in a loop a copy.
            loops = call.layout is Layout.LISTED and reorders(self.estimates.rates)
            if not loops or _is_image(node) or not any(map(_is_image, node.all_input_nodes)):
                return views.total
            copy = self.estimates.passes(0, REORDERED, self._size(node), node in self.estimates.tracked)
            return views.total + copy.total
        # Operands and result of all members; a loop reads shared operands once per member.
        traffic = self._size(node)
        for item in leaves((call.args, call.kwargs), (Value, Operand)):
            value = item.value if isinstance(item, Operand) else item
            alone = value.shared and call.layout is not Layout.LISTED
            traffic += self.bytes.get(value.node, 0) * (1 if alone else members)
        return self.estimates.operator(call.lowering, node, node, members, traffic).total

    def move(self, value: Value, convert: Conversion) -> float:
        """Return the seconds to convert ``value`` to another layout, backward included."""
        tracked, image = value.node in self.estimates.tracked, _is_image(value.node)
        estimate = self.estimates.conversion(convert, self._size(value.node), tracked=tracked, image=image)
        return estimate.total * (CAUTION if convert in PACKING else 1.0)

    def _size(self, node: fx.Node) -> int:
        """Return the bytes of a value for all members."""
        return self.bytes.get(node, 0) * self.estimates.members


def _varying(example: Any) -> int | None:
    """Return the size that the first varying dim of a tensor had when it was captured."""
    sizes = example.shape if isinstance(example, Tensor) else ()
    return next((hint(size) for size in sizes if not isinstance(size, int)), None)


def _is_image(node: fx.Node) -> bool:
    """True for a value with channels and at least two more dims that is no trained parameter."""
    example = node.meta.get("val")
    if not isinstance(example, Tensor) or example.dim() < 4:
        return False
    return node.op != "placeholder" or not example.requires_grad

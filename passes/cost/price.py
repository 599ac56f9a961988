"""What calls and conversions cost, from their shapes: the one place that knows how fast lowerings are.

Seconds = calls * overhead + arithmetic / rate + traffic / bandwidth, forward and backward together. The `Efficiency` of
a lowering says how it fares in each: seconds for every call, and the share of the device's rate and bandwidth that it
reaches. Loops make one call per member. Only ratios decide, so one processor stands for all of its kind; what a machine
really does is told by measuring (`hfusion.passes.cost.measure`).

Efficiencies are fits to forward and backward of single operators, on one core with 4 and 16 members: within a
fifth of the times of convolutions, linear layers, BatchNorm and pooling of 2^12 to 2^19 elements of a member. What they
reproduce of whole training steps: convolutions run best for all members at once up to about 2^16 elements of a member,
above that in a channels-last loop; a loop once begun is left for less than about 2^15; what merges the dims of images
in a loop, or takes them out of it, costs its gradient dear. No time of a GPU went in: there all lowerings are alike but
for their calls, so that one call for all members is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from hfusion.ops.lowering import Efficiency, View
from hfusion.ops.rule import Call, Operand, Value, hint
from hfusion.passes.cost.flops import bytes_of, family, flops, sizes_of
from hfusion.passes.layouts import Price

US = 1e-6


@dataclass(frozen=True)
class Speeds:
    """FLOP/s of large products, bytes/s of elementwise operators, seconds of a view.

    ``efficiency``: of all lowerings alike, where theirs were not measured. ``reorders``: whether loops over images have
    their own order of memory, channels-last.
    """

    flops: float
    bandwidth: float
    view: float
    reorders: bool
    efficiency: Efficiency | None = None


_ACCELERATOR = Speeds(30e12, 1.5e12, 4 * US, False, Efficiency(30 * US))
SPEEDS: Mapping[str, Speeds] = {"cpu": Speeds(150e9, 16e9, 4 * US, True)}

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
# Conversions that handle every member's tensor by itself.
LOOPING = frozenset({stacked_to_listed, packed_to_listed, listed_to_stacked, listed_to_packed})
# The same of images, beside these: they change their order of memory, and the gradient comes in an order that the value
# before does not have; elementwise operators take 4 ns for an element of such a pair.
REORDERED = (2, 14)
REORDERING = frozenset({*LOOPING, stacked_to_packed})
# What packing counts for each second that it takes: calls are estimated to a fifth, and a region that is left for less
# than that error is left in vain.
CAUTION = 1.5
PACKING = frozenset({listed_to_packed, stacked_to_packed})


@dataclass(frozen=True)
class Model:
    """The prices of one member's graph: ``bytes`` of its values, and those that get a gradient."""

    members: int
    batch: int
    device: torch.device
    bytes: Mapping[fx.Node, int]
    tracked: frozenset[fx.Node]

    @staticmethod
    def of(graph: fx.Graph, members: int) -> Model:
        examples = {node: node.meta.get("val") for node in graph.nodes}
        batch = next(filter(None, map(_varying, examples.values())), 1)
        sizes = {node: bytes_of(example, batch) for node, example in examples.items()}
        devices = [example.device for example in examples.values() if isinstance(example, Tensor)]
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        return Model(members, batch, device, sizes, _tracked(graph))

    @property
    def speeds(self) -> Speeds:
        return SPEEDS.get(self.device.type, _ACCELERATOR)

    def calls(self, node: fx.Node, calls: Sequence[Call]) -> Sequence[Price]:
        return [self.call(node, call) for call in calls]

    def call(self, node: fx.Node, call: Call) -> Price:
        if call.layout is Layout.SHARED:
            return Price(0.0)
        calls = self.members if call.layout is Layout.LISTED else 1
        if is_view(call):
            return Price(calls * self.speeds.view + self._unfolding(node, call))
        efficiency, tracked = self.speeds.efficiency or call.lowering.efficiency, node in self.tracked
        arithmetic = flops(node, self.batch) * self.members * self._products(node)
        if efficiency.more is not None:
            arithmetic += efficiency.more(sizes_of(node, self.batch)) * self.members
        traffic = self._traffic(node, call) * (3 if tracked else 1)
        seconds = calls * efficiency.call
        seconds += arithmetic / (self.speeds.flops * efficiency.arithmetic)
        seconds += traffic / (self.speeds.bandwidth * efficiency.traffic)
        return Price(seconds)

    def move(self, value: Value, convert: Conversion) -> float:
        passes = self._passes(value.node, PASSES.get(convert, (0, 0)))
        if self.speeds.reorders and convert in REORDERING and _is_image(value.node):
            passes += self._passes(value.node, REORDERED)
        calls = 1 + (self.members if convert in LOOPING else 0)
        weight = CAUTION if convert in PACKING else 1.0
        return calls * self.speeds.view + weight * passes * self._size(value.node) / self.speeds.bandwidth

    def _passes(self, node: fx.Node, passes: tuple[int, int]) -> int:
        return passes[0] + (passes[1] if node in self.tracked else 0)

    def _size(self, node: fx.Node) -> int:
        """Bytes for all members."""
        return self.bytes.get(node, 0) * self.members

    def _unfolding(self, node: fx.Node, call: Call) -> float:
        """Of a view that merges the dims of images in a loop, whose order does not allow it."""
        merged = call.layout is Layout.LISTED and not _is_image(node) and any(map(_is_image, node.all_input_nodes))
        passes = self._passes(node, REORDERED) if merged and self.speeds.reorders else 0
        return passes * self._size(node) / self.speeds.bandwidth

    def _products(self, node: fx.Node) -> float:
        """How many times the forward's arithmetic there is, with the backward."""
        if node not in self.tracked:
            return 1
        if family(node) == "scaled_dot_product_attention":
            return 3.5
        return 1 + min(2, sum(_rank(source) >= 2 for source in node.all_input_nodes if source in self.tracked))

    def _traffic(self, node: fx.Node, call: Call) -> int:
        """Bytes of operands and result, of all members; a loop reads what is shared once for each."""
        total = self._size(node)
        for item in leaves((call.args, call.kwargs), (Value, Operand)):
            value = item.value if isinstance(item, Operand) else item
            alone = value.shared and call.layout is not Layout.LISTED
            total += self.bytes.get(value.node, 0) * (1 if alone else self.members)
        return total


def _varying(example: Any) -> int | None:
    """The size that the first varying dim of a tensor had when it was captured."""
    sizes = example.shape if isinstance(example, Tensor) else ()
    return next((hint(size) for size in sizes if not isinstance(size, int)), None)


def _tracked(graph: fx.Graph) -> frozenset[fx.Node]:
    """The values that get a gradient."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        example = node.meta.get("val")
        if node.op == "placeholder":
            if isinstance(example, Tensor) and example.requires_grad:
                found.add(node)
        elif family(node) != "detach" and _floating(example) and found.intersection(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _floating(example: Any) -> bool:
    parts = example if isinstance(example, list | tuple) else (example,)
    return any(isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex()) for part in parts)


def is_view(call: Call) -> bool:
    """Whether a call gives a view of its operand, or a part of a nest, without work."""
    return call.lowering.view in (View.ALWAYS, View.IN_ORDER)


def _is_image(node: fx.Node) -> bool:
    """Whether the value has channels and at least two more dims; what is trained has no order that matters."""
    return _rank(node) > 3 and not (node.op == "placeholder" and node.meta["val"].requires_grad)


def _rank(node: fx.Node) -> int:
    example = node.meta.get("val")
    return example.dim() if isinstance(example, Tensor) else 0

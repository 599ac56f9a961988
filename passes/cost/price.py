"""Estimated costs of the candidate calls and conversions of one member's graph, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hfusion.core.layout import Conversion, Layout, listed_to_packed, stacked_to_packed
from hfusion.core.tree import leaves
from hfusion.device.calibrate import ComputeRates, compute_rates
from hfusion.ops.rule import Call, Operand, Value, hint
from hfusion.passes.cost.flops import bytes_of, dtype_of, family, floating, flops, more_of, products
from hfusion.passes.cost.roofline import (
    REORDERED,
    Work,
    conversion_seconds,
    passes_seconds,
    reorders,
    seconds,
)
from hfusion.passes.layouts import Price

# Factor on the estimated cost of packing: estimates of calls are accurate to a fifth, and a gain that is smaller than
# this error is no reason to leave a region.
CAUTION = 1.5
PACKING = frozenset({listed_to_packed, stacked_to_packed})


@dataclass(frozen=True)
class Model:
    """The prices of one member's graph on a machine of ``rates``.

    ``bytes`` of its values, and those that get a gradient, ``tracked``.
    """

    members: int
    batch: int
    device: torch.device
    rates: ComputeRates
    bytes: Mapping[fx.Node, int]
    tracked: frozenset[fx.Node]

    @staticmethod
    def of(graph: fx.Graph, members: int, rates: ComputeRates | None = None) -> Model:
        """Return the model of ``graph``. ``rates``: by default those of the graph's device on this machine."""
        examples = {node: node.meta.get("val") for node in graph.nodes}
        batch = next(filter(None, map(_varying, examples.values())), 1)
        sizes = {node: bytes_of(example, batch) for node, example in examples.items()}
        devices = [example.device for example in examples.values() if isinstance(example, Tensor)]
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        return Model(members, batch, device, rates or compute_rates(device), sizes, _tracked(graph))

    def calls(self, node: fx.Node, calls: Sequence[Call]) -> Sequence[Price]:
        return [self.call(node, call) for call in calls]

    def call(self, node: fx.Node, call: Call) -> Price:
        if call.layout is Layout.SHARED:
            return Price(0.0)
        estimate = seconds(call.lowering, self._work(node, call), self.rates)
        return Price(estimate.total + self._unfolding(node, call))

    def _work(self, node: fx.Node, call: Call) -> Work:
        members = self.members
        calls = members if call.lowering.loops else 1
        tracked = node in self.tracked
        if call.lowering.view.likely:
            return Work(calls, 0.0, 0.0, 0.0, 0.0, tracked, view=True)
        arithmetic = flops(node, self.batch) * members
        examples = [source.meta.get("val") for source in node.all_input_nodes if source in self.tracked]
        more = more_of(call.lowering, node, self.batch, self.rates) * members
        backward, dtype = products(node, examples), dtype_of(node)
        return Work(calls, arithmetic, backward, more, self._traffic(node, call), tracked, dtype=dtype)

    def move(self, value: Value, convert: Conversion) -> float:
        tracked, image = value.node in self.tracked, _is_image(value.node)
        estimate = conversion_seconds(
            convert, self._size(value.node), self.members, self.rates, tracked=tracked, image=image
        )
        return estimate.total * (CAUTION if convert in PACKING else 1.0)

    def _size(self, node: fx.Node) -> int:
        """Return the bytes of a value for all members."""
        return self.bytes.get(node, 0) * self.members

    def _unfolding(self, node: fx.Node, call: Call) -> float:
        """Return the seconds to copy an image whose dims a view merges in a loop; channels-last makes that a copy."""
        loops = call.lowering.view.likely and call.layout is Layout.LISTED and reorders(self.rates)
        if not loops or _is_image(node) or not any(map(_is_image, node.all_input_nodes)):
            return 0.0
        return passes_seconds(0, REORDERED, self._size(node), self.rates, node in self.tracked).total

    def _traffic(self, node: fx.Node, call: Call) -> int:
        """Return the bytes of operands and result for all members; a loop reads shared operands once per member."""
        total = self._size(node)
        for item in leaves((call.args, call.kwargs), (Value, Operand)):
            value = item.value if isinstance(item, Operand) else item
            alone = value.shared and call.layout is not Layout.LISTED
            total += self.bytes.get(value.node, 0) * (1 if alone else self.members)
        return total


def _varying(example: Any) -> int | None:
    """Return the size that the first varying dim of a tensor had when it was captured."""
    sizes = example.shape if isinstance(example, Tensor) else ()
    return next((hint(size) for size in sizes if not isinstance(size, int)), None)


def _tracked(graph: fx.Graph) -> frozenset[fx.Node]:
    """The values that get a gradient."""
    tracked: set[fx.Node] = set()
    for node in graph.nodes:
        example = node.meta.get("val")
        if node.op == "placeholder":
            if isinstance(example, Tensor) and example.requires_grad:
                tracked.add(node)
        elif family(node) != "detach" and floating(example) and tracked.intersection(node.all_input_nodes):
            tracked.add(node)
    return frozenset(tracked)


def _is_image(node: fx.Node) -> bool:
    """True for a value with channels and at least two more dims that is no trained parameter."""
    return _rank(node) > 3 and not (node.op == "placeholder" and node.meta["val"].requires_grad)


def _rank(node: fx.Node) -> int:
    example = node.meta.get("val")
    return example.dim() if isinstance(example, Tensor) else 0

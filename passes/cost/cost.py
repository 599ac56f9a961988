"""The costs of a program's operators on a device: a line of steps, the storages between them, the weights.

Estimates from shapes alone, on the careful side:

- `hfusion.passes.cost.price` estimates the time of an operator from its lowering. Its backward takes one product
  per operand that gets a gradient, and twice the traffic.
- The `Lowering` of every call states what is saved for backward, and what is a view. A view shares the storage of its
  base; an expanded value counts as if it were copied, since it crosses a cut as a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from hfusion.core.layout import Layout
from hfusion.core.program import Kind, Program, Slot, source_line
from hfusion.device.calibrate import Rates
from hfusion.ops.lowering import KeptOperands, Lowering, View
from hfusion.passes.cost.flops import SymbolSizes, bytes_of, concrete, family, sizes_of
from hfusion.passes.cost.price import Estimates, Seconds, gets_gradient


@dataclass(frozen=True)
class OperatorCost:
    """One operator. ``where`` is for people; ``forward`` and ``backward`` are seconds.

    ``saved``: bytes kept for backward in addition to operands and result; ``workspace``: bytes allocated while it runs;
    ``summed``: bytes of the gradients that its backward makes and adds to others.
    """

    where: str
    forward: float = 0.0
    backward: float = 0.0
    saved: int = 0
    workspace: int = 0
    summed: int = 0


@dataclass(frozen=True)
class Storage:
    """``size`` bytes made by step ``born`` (0 for inputs of the program), last used by step ``last``.

    ``last`` is the number of steps for results of the program. ``saved`` is the first step that keeps it for
    backward, None if none does.
    """

    size: int
    born: int
    last: int
    saved: int | None = None


@dataclass(frozen=True)
class Weight:
    """``size`` bytes of a parameter or buffer, the steps that use it (ascending), and whether it is trained.

    ``written``: whether training changes it, which is so for buffers and for trained parameters.
    """

    size: int
    uses: tuple[int, ...]
    trained: bool = True
    written: bool = True


@dataclass(frozen=True)
class Line:
    """The costs of a linearised program: those of all members for one minibatch."""

    steps: tuple[OperatorCost, ...]
    storages: tuple[Storage, ...]
    weights: tuple[Weight, ...]


def operators(program: Program) -> tuple[fx.Node, ...]:
    """The linearised graph: the calls of ``program.module`` in order; `Shard` counts in these."""
    return tuple(node for node in program.module.graph.nodes if node.op == "call_function")


def symbol_sizes(program: Program, shapes: Sequence[Sequence[int]]) -> SymbolSizes:
    """Return the size of each symbol of ``program`` for inputs of ``shapes``, as a member sees them."""
    sizes: list[tuple[Any, int]] = []
    for node, slot in zip(program.module.graph.find_nodes(op="placeholder"), program.slots, strict=True):
        example = node.meta.get("example")
        if slot.kind is Kind.INPUT and isinstance(example, Tensor):
            symbols = [size.node.expr if isinstance(size, torch.SymInt) else None for size in example.shape]
            sizes += zip(symbols, shapes[int(slot.name)], strict=True)
    return frozenset((symbol, size) for symbol, size in sizes if symbol is not None and symbol.is_Symbol)


def line(program: Program, batch: SymbolSizes, rates: Rates) -> Line:
    """The costs of ``program`` for sizes ``batch``; programs captured with fixed sizes keep theirs."""
    tracked: set[fx.Node] = set()
    tracing = _Tracing(Estimates(program.members, batch, rates, tracked), tracked)
    waiting = iter(program.slots)
    nodes = operators(program)
    for node in program.module.graph.nodes:
        if node.op == "placeholder":
            tracing.placeholder(node, next(waiting))
    for index, node in enumerate(nodes):
        tracing.step(index, node)
    output = next(node for node in program.module.graph.nodes if node.op == "output")
    for node in output.all_input_nodes:
        tracing.use(node, len(nodes))
    return tracing.line(len(nodes))


@dataclass
class _Root:
    """A storage while its uses are gathered; ``slot`` if it is a weight."""

    size: int
    born: int
    uses: list[int] = field(default_factory=list)
    slot: Slot | None = None
    trained: bool = False
    saved: int | None = None

    @property
    def written(self) -> bool:
        return self.trained or (self.slot is not None and self.slot.kind is Kind.BUFFER)


@dataclass
class _Tracing:
    """Follows storages and gradients through a program."""

    estimates: Estimates
    tracked: set[fx.Node]
    roots: dict[fx.Node, _Root] = field(default_factory=dict)
    steps: list[OperatorCost] = field(default_factory=list)
    results: list[_Root] = field(default_factory=list)

    def bytes(self, node: fx.Node) -> int:
        """Bytes of a value of the array."""
        return bytes_of(node.meta.get("example"), self.estimates.batch) * self.copies(node)

    def copies(self, node: fx.Node) -> int:
        """Return for how many members a value is held."""
        return 1 if node.meta.get("layout") is Layout.SHARED else self.estimates.members

    def placeholder(self, node: fx.Node, slot: Slot) -> None:
        example = node.meta.get("example")
        needs_gradient = isinstance(example, Tensor) and example.requires_grad
        if needs_gradient:
            self.tracked.add(node)
        is_weight = slot.kind is not Kind.INPUT
        trained = needs_gradient and slot.kind is Kind.PARAMETER
        self.roots[node] = _Root(self.bytes(node), 0, slot=slot if is_weight else None, trained=trained)

    def use(self, node: fx.Node, index: int) -> None:
        uses = self.roots[node].uses
        if not uses or uses[-1] != index:
            uses.append(index)

    def step(self, index: int, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            self.use(source, index)
        if gets_gradient(node, node.meta.get("example"), self.tracked):
            self.tracked.add(node)
        self.roots[node] = root = self._root(index, node)
        self.results.append(root)
        self.use(node, index)
        for saved in saves(node, self.tracked):
            if self.roots[saved].saved is None:
                self.roots[saved].saved = index
        # Bytes saved in addition to operands and result, and those of temporaries.
        counts = lowering(node).saves.extra_bytes, lowering(node).saves.workspace
        extra_bytes = workspace = 0
        if any(counts):
            sizes = sizes_of(node.meta["origin"], self.estimates.batch)
            extra_bytes, workspace = (0 if count is None else count(sizes) * self.copies(node) for count in counts)
        tracked = node in self.tracked
        durations = self._seconds(node, is_view=any(self.roots[source] is root for source in node.all_input_nodes))
        self.steps.append(OperatorCost(_where(node), *durations, extra_bytes if tracked else 0, workspace))

    def _root(self, index: int, node: fx.Node) -> _Root:
        source = viewed(node, self.estimates.batch)
        size = self.bytes(node)
        if source is not None:
            root = self.roots[source]
            if root.slot is not None or size <= root.size:
                return root
        return _Root(size, index)

    def _seconds(self, node: fx.Node, *, is_view: bool) -> Seconds:
        tracked = node in self.tracked
        if node.meta.get("transition"):
            # Channels-last is not considered for weights.
            weight = any(self.roots[source].slot is not None for source in node.all_input_nodes)
            example, members = node.meta.get("example"), self.estimates.members
            image = isinstance(example, Tensor) and example.dim() > 3 and not weight
            size = bytes_of(example, self.estimates.batch) * members
            return self.estimates.conversion(lowering(node).fn, size, tracked=tracked, image=image)
        if is_view:
            return self.estimates.views(self.estimates.members if lowering(node).loops else 1, tracked)
        traffic = sum(self.bytes(value) for value in (node, *node.all_input_nodes))
        return self.estimates.operator(lowering(node), node, node.meta["origin"], self.copies(node), traffic)

    def line(self, count: int) -> Line:
        unique = list({id(root): root for root in self.roots.values()}.values())
        weights = [Weight(r.size, tuple(r.uses), r.trained, r.written) for r in unique if r.slot is not None and r.uses]
        values = [Storage(r.size, r.born, r.uses[-1], r.saved) for r in unique if r.slot is None and r.uses]
        inside = tuple(replace(w, uses=tuple(u for u in w.uses if u < count)) for w in weights)
        summed = self._summed(count)
        steps = [replace(step, summed=size) for step, size in zip(self.steps, summed, strict=True)]
        return Line(tuple(steps), tuple(v for v in values if v.size), tuple(w for w in inside if w.uses))

    def _summed(self, count: int) -> list[int]:
        """Return, per step, the bytes of operands that later steps use, too: their gradients are summed at this step.

        Tied weights count at every use, since a sum of gradients may be passed from shard to shard.
        """
        summed = [0] * count
        for root in {id(root): root for node, root in self.roots.items() if node in self.tracked}.values():
            # The gradient of a view is a view.
            uses = [use for use in root.uses if use < count and self.results[use] is not root]
            for use in uses if root.slot is not None and len(uses) > 1 else uses[:-1]:
                summed[use] += root.size
        return summed


def lowering(node: fx.Node) -> Lowering:
    """Return the lowering of a call of a program."""
    lowered: Lowering = node.meta["lowering"]
    return lowered


def saves(node: fx.Node, tracked: set[fx.Node]) -> Sequence[fx.Node]:
    """The operands, and the result, that autograd keeps for the backward of ``node``."""
    if node not in tracked:
        return ()
    inputs, saved = node.all_input_nodes, lowering(node).saves
    result = (node,) if saved.result else ()
    if saved.operands is KeptOperands.NONE:
        return result
    if saved.operands is KeptOperands.FACTORS:
        inputs = [x for x in inputs if any(other in tracked for other in inputs if other is not x)]
    return (*inputs, *result)


def viewed(node: fx.Node, batch: SymbolSizes) -> fx.Node | None:
    """The operand whose storage the result shares; None if the result has its own."""
    inputs, view = node.all_input_nodes, lowering(node).view
    if not inputs or not view.likely:
        return None
    copied = view is View.IN_ORDER and not _in_order(inputs[0].meta.get("example"), batch)
    return None if copied else inputs[0]


def _in_order(example: object, batch: SymbolSizes) -> bool:
    if not isinstance(example, Tensor):
        return True
    sizes, strides = concrete(example.shape, batch), concrete(example.stride(), batch)
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _where(node: fx.Node) -> str:
    """Return a text such as ``relu_default (relu at net.py:12)``."""
    origin = node.meta.get("origin")
    at = source_line(origin) if origin is not None else ""
    # A transition has no operator of a member.
    return f"{node.name} ({family(origin or node)}{f' at {at}' if at else ''})"

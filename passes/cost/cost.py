"""What every operator of a program costs on a device: a line of steps, the storages between them, the weights.

Estimates from shapes alone, on the careful side:

- An operator takes the time of its arithmetic or of its memory traffic, whichever is longer. Its backward takes
  one such product per operand that gets a gradient, or twice the traffic.
- Saved for backward: operands of products whose partner gets a gradient, results of functions whose derivative
  is written in the result (relu, tanh, softmax), masks of dropout, else the operands. torch's own table is
  ``tools/autograd/derivatives.yaml``.
- Views share the storage of what they view; an expanded value counts as if it were copied, since it crosses a
  cut as a copy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.layout import Layout
from hfusion.core.program import Kind, Program, Slot, source_line
from hfusion.device.machine import Rates
from hfusion.passes.cost.flops import RECURRENT, bytes_of, concrete, family, flops, hidden, is_product, scores


@dataclass(frozen=True)
class Step:
    """One operator. ``where`` is for people; ``forward`` and ``backward`` are seconds.

    ``saved``: bytes kept for backward beside its operands and result; ``workspace``: bytes it takes while it runs;
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

    ``written``: whether training changes it, as it does buffers and what is trained.
    """

    size: int
    uses: tuple[int, ...]
    trained: bool = True
    written: bool = True


@dataclass(frozen=True)
class Line:
    """A linearised program in numbers: what all members cost for one minibatch."""

    steps: tuple[Step, ...]
    storages: tuple[Storage, ...]
    weights: tuple[Weight, ...]


def operators(program: Program) -> tuple[fx.Node, ...]:
    """The linearised graph: the calls of ``program.module`` in order; `Shard` counts in these."""
    return tuple(node for node in program.module.graph.nodes if node.op == "call_function")


def line(program: Program, batch: int, rates: Rates) -> Line:
    """The costs of ``program`` for ``batch`` samples; programs captured with fixed sizes keep theirs."""
    tracing = _Tracing(program.members, batch, rates)
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

    members: int
    batch: int
    rates: Rates
    roots: dict[fx.Node, _Root] = field(default_factory=dict)
    tracked: set[fx.Node] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)
    results: list[_Root] = field(default_factory=list)

    def bytes(self, node: fx.Node) -> int:
        """Bytes of a value of the array."""
        return bytes_of(node.meta.get("example"), self.batch) * self.copies(node)

    def copies(self, node: fx.Node) -> int:
        return 1 if node.meta.get("layout") is Layout.SHARED else self.members

    def placeholder(self, node: fx.Node, slot: Slot) -> None:
        example = node.meta.get("example")
        needs_gradient = isinstance(example, Tensor) and example.requires_grad
        if needs_gradient:
            self.tracked.add(node)
        own = slot.kind is not Kind.INPUT
        trained = needs_gradient and slot.kind is Kind.PARAMETER
        self.roots[node] = _Root(self.bytes(node), 0, slot=slot if own else None, trained=trained)

    def use(self, node: fx.Node, index: int) -> None:
        uses = self.roots[node].uses
        if not uses or uses[-1] != index:
            uses.append(index)

    def step(self, index: int, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            self.use(source, index)
        if family_of(node) != "detach" and _floating(node) and self.tracked.intersection(node.all_input_nodes):
            self.tracked.add(node)
        self.roots[node] = root = self._root(index, node)
        self.results.append(root)
        self.use(node, index)
        for kept in saves(node, self.tracked):
            if self.roots[kept].saved is None:
                self.roots[kept].saved = index
        view = any(self.roots[source] is root for source in node.all_input_nodes)
        moved = 0 if view else sum(self.bytes(value) for value in (node, *node.all_input_nodes))
        arithmetic = self.copies(node) * flops(node.meta["origin"], self.batch) if "origin" in node.meta else 0
        extra, workspace = self._extras(node)
        tracked = node in self.tracked
        self.steps.append(
            Step(
                _where(node),
                self._seconds(arithmetic, moved),
                self._seconds(arithmetic * self._products(node), 2 * moved) if tracked else 0.0,
                extra if tracked else 0,
                workspace,
            )
        )

    def _root(self, index: int, node: fx.Node) -> _Root:
        source = viewed(node, self.batch)
        size = self.bytes(node)
        if source is not None:
            root = self.roots[source]
            if root.slot is not None or size <= root.size:
                return root
        return _Root(size, index)

    def _products(self, node: fx.Node) -> float:
        """How many times the forward's arithmetic the backward does."""
        if family_of(node) == "scaled_dot_product_attention":
            return 2.5
        examples = [source.meta.get("example") for source in node.all_input_nodes if source in self.tracked]
        return min(2, sum(isinstance(example, Tensor) and example.dim() >= 2 for example in examples))

    def _seconds(self, arithmetic: float, moved: float) -> float:
        return max(arithmetic / self.rates.flops, moved / self.rates.memory)

    def _extras(self, node: fx.Node) -> tuple[int, int]:
        """Bytes saved beside operands and result, and bytes of temporaries."""
        name, how, own = family_of(node), str(node.meta.get("how", "")), self.bytes(node)
        if how == "off" or node.meta.get("transition"):
            return 0, 0
        if name == "scaled_dot_product_attention":
            return self._attention(node, how)
        if name in RECURRENT:
            kept = hidden(node.meta["origin"], self.batch) * self.copies(node) * _width(node)
            # oneDNN's LSTM keeps 16 values per unit and row, of which its matrices give 8; ours less than these.
            once = how == "members as batch" or name not in ("lstm", "opaque")
            return (kept, kept) if once else (2 * kept, 2 * kept)
        if name == "matmul":
            copied = self._broadcast(node)
            return copied, copied
        if "max_pool" in name:
            return own // node.meta["example"].element_size() * 8, 0
        if "cross_entropy" in name:
            return self.bytes(node.all_input_nodes[0]), 0
        if name in ("layer_norm", "rms_norm"):
            statistics = 2 * own // concrete(node.meta["example"].shape, self.batch)[-1]
            return statistics + (own if how.endswith("then scaled") else 0), 0
        return (own, 0) if "dropout" in name else (0, 0)

    def _attention(self, node: fx.Node, how: str) -> tuple[int, int]:
        """Written out it keeps its weights before, in and after the dropout; else a sum per query."""
        query = node.meta["origin"].args[0].meta["val"]
        weights = scores(node.meta["origin"], self.batch) * self.copies(node)
        if how.startswith("written out"):
            return 3 * weights + bytes_of(query, self.batch) * self.copies(node), 2 * weights
        return bytes_of(query, self.batch) * self.copies(node) // concrete(query.shape, self.batch)[-1], 0

    def _broadcast(self, node: fx.Node) -> int:
        """Bytes of operands that a product of stacked factors copies for every sample."""
        if node.meta.get("layout") is Layout.SHARED:
            return 0
        out = concrete(node.meta["example"].shape, self.batch)
        copied = 0
        for source in node.all_input_nodes:
            example = source.meta.get("example")
            if isinstance(example, Tensor) and 2 <= example.dim() < len(out):
                sizes = concrete(example.shape, self.batch)
                repeats = math.prod(out[:-2]) // max(1, math.prod(sizes[:-2]))
                copied += repeats * bytes_of(example, self.batch) * self.copies(node)
        return copied

    def line(self, count: int) -> Line:
        unique = list({id(root): root for root in self.roots.values()}.values())
        weights = [Weight(r.size, tuple(r.uses), r.trained, r.written) for r in unique if r.slot is not None and r.uses]
        values = [Storage(r.size, r.born, r.uses[-1], r.saved) for r in unique if r.slot is None and r.uses]
        inside = tuple(replace(w, uses=tuple(u for u in w.uses if u < count)) for w in weights)
        summed = self._summed(count)
        steps = [replace(step, summed=size) for step, size in zip(self.steps, summed, strict=True)]
        return Line(tuple(steps), tuple(v for v in values if v.size), tuple(w for w in inside if w.uses))

    def _summed(self, count: int) -> list[int]:
        """Per step the bytes of operands that a later one uses, too: its gradients are added to those of that one.

        Of tied weights at every use, since a sum of gradients may be handed from shard to shard.
        """
        summed = [0] * count
        for root in {id(root): root for node, root in self.roots.items() if node in self.tracked}.values():
            # The gradient of a view is a view.
            uses = [use for use in root.uses if use < count and self.results[use] is not root]
            for use in uses if root.slot is not None and len(uses) > 1 else uses[:-1]:
                summed[use] += root.size
        return summed


# Operators whose gradient needs no operand, only sizes; the mask of a dropout counts by itself.
_SUMS = ("add", "sub", "rsub", "neg", "sum", "mean", "cumsum", "cat", "stack", "adaptive_avg_pool1d")
_COPIES = (
    "clone",
    "contiguous",
    "to",
    "_to_copy",
    "copy",
    "detach",
    "repeat",
    "roll",
    "flip",
    "pad",
    "constant_pad_nd",
)
_DRAWS = ("dropout", "feature_dropout", "alpha_dropout")
_SIZED = ("upsample_nearest2d", "upsample_bilinear2d", "slice_scatter", "select_scatter")
_NOTHING = frozenset((*_SUMS, *_COPIES, *_DRAWS, *_SIZED))
# Functions whose derivative is written in their result, or follows the indices that they return.
_EXPONENTIALS = ("tanh", "sigmoid", "exp", "softmax", "_softmax", "log_softmax", "_log_softmax")
_RESULT = frozenset((*_EXPONENTIALS, "relu", "sqrt", "rsqrt", "reciprocal", "max", "min", "sort", "topk"))
# Views only if the operand lies in order.
_MAYBE_COPIES = frozenset(["reshape", "contiguous", "flatten"])


def family_of(node: fx.Node) -> str:
    """`family` of the member's operator that the array's ``node`` computes; a transition's own name."""
    return family(node.meta.get("origin", node))


def saves(node: fx.Node, tracked: set[fx.Node]) -> Sequence[fx.Node]:
    """The operands, or the result, that autograd keeps for the backward of ``node``."""
    inputs = node.all_input_nodes
    if node not in tracked or node.meta.get("how") == "off":
        return ()
    if node.meta.get("transition") or family_of(node) in _NOTHING or _returns_view(node):
        return ()
    if family_of(node) in _RESULT:
        return (node,)
    if is_product(node.meta["origin"]):
        both = (node,) if family_of(node) == "scaled_dot_product_attention" else ()
        return (*(x for x in inputs if any(other in tracked for other in inputs if other is not x)), *both)
    return inputs


def viewed(node: fx.Node, batch: int) -> fx.Node | None:
    """The operand whose storage the result shares; None if the result has its own."""
    inputs = node.all_input_nodes
    if not inputs:
        return None
    if node.meta.get("transition"):
        return inputs[0] if node.meta.get("how") == "view" else None
    if node.meta.get("how") == "off":
        return inputs[0]
    if not _returns_view(node):
        return None
    if family_of(node) in _MAYBE_COPIES and not _in_order(inputs[0].meta.get("example"), batch):
        return None
    same = getattr(node.meta.get("example"), "dtype", None) == getattr(inputs[0].meta.get("example"), "dtype", None)
    return inputs[0] if same or family_of(node) != "to" else None


def _returns_view(node: fx.Node) -> bool:
    origin = node.meta.get("origin")
    if origin is None:
        return False
    if origin.target is operator.getitem:
        return True
    if not isinstance(origin.target, OpOverload):
        return False
    returns = origin.target._schema.returns
    return bool(returns) and returns[0].alias_info is not None


def _in_order(example: object, batch: int) -> bool:
    if not isinstance(example, Tensor):
        return True
    sizes, strides = concrete(example.shape, batch), concrete(example.stride(), batch)
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _floating(node: fx.Node) -> bool:
    example = node.meta.get("example")
    parts = example if isinstance(example, list | tuple) else (example,)
    return any(isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex()) for part in parts)


def _width(node: fx.Node) -> int:
    """Bytes of one value of the result."""
    example = node.meta["example"]
    first = example[0] if isinstance(example, list | tuple) else example
    return int(first.element_size())


def _where(node: fx.Node) -> str:
    """Such as ``relu_default (relu at net.py:12)``."""
    origin = node.meta.get("origin")
    at = source_line(origin) if origin is not None else ""
    return f"{node.name} ({family_of(node)}{f' at {at}' if at else ''})"

"""Prove from its graph that a member's forward computes every sample of a batch independently.

`output_samples` follows the dim of samples from the inputs to the outputs, operator by operator, by the rules of
`hfusion.passes.sample_rules`. Every shape on the way is compared with the rules. The results of such a forward do not
depend on the samples with which a batch is padded.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.tree import contains, leaves
from hfusion.ops import random
from hfusion.ops.rule import MemberScalars
from hfusion.passes.candidates import by_name
from hfusion.passes.sample_rules import RULES, TAKE_SIZES, broadcast
from hfusion.passes.sampled_call import SampledCall, SampleDim, SamplesMix, check


def output_samples(graph: fx.Graph, batches: Collection[fx.Node]) -> tuple[int | None, ...] | str:
    """Return the dim of samples of each flat output of a member's graph, None for one that depends on no sample.

    Args:
        batches: the placeholders whose first dim is that of samples; of one number in all of them.

    Returns:
        The dims; or the reason why samples may depend on each other.
    """
    try:
        return _Walk.of(graph, batches).outputs(graph)
    except SamplesMix as why:
        return str(why)


@dataclass(frozen=True)
class _Walk:
    """State of a walk over a graph: the symbol of the number of samples, and the dim of samples of each value.

    Attributes:
        symbols: those of the first sizes of all batches, which are of one number, each with the first of them.
        where: a `SampleDim`, None, or a tuple of these for several results.
    """

    samples: Any
    symbols: Mapping[Any, Any]
    where: dict[fx.Node, Any]

    @staticmethod
    def of(graph: fx.Graph, batches: Collection[fx.Node]) -> _Walk:
        symbols = [_expression(node.meta["val"].shape[0]) for node in batches]
        check(bool(symbols) and all(s.is_symbol for s in symbols), "forward depends on the number of samples")
        walk = _Walk(symbols[0], dict.fromkeys(symbols, symbols[0]), {})
        for node in graph.find_nodes(op="placeholder"):
            walk.where[node] = SampleDim(0) if node in batches else None
            walk.compare(node)
        for node in graph.nodes:
            if node.op not in ("placeholder", "output"):
                walk.visit(node)
        return walk

    def shape(self, example: Any) -> tuple[Any, ...]:
        """Return the sizes of a tensor or of the first of several tensors; empty for other values."""
        first = next(leaves(example, Tensor), None)
        return () if first is None else tuple(map(self.size, first.shape))

    def size(self, size: Any) -> Any:
        return _expression(size).subs(self.symbols)

    def visit(self, node: fx.Node) -> None:
        try:
            self.where[node] = self.placed(node)
            self.compare(node)
        except SamplesMix as why:
            raise SamplesMix(f"{_name(node)}: {why}") from None

    def placed(self, node: fx.Node) -> Any:
        """Return the `SampleDim` of the result of a call, None if it holds no samples."""
        if node.target is operator.getitem:
            source, item = node.args
            places = self.where[source]  # type: ignore[index]
            return places[item] if isinstance(places, tuple) else places  # type: ignore[index]
        operands = [n for n in node.all_input_nodes if contains(n.meta.get("val"), Tensor)]
        if not contains(node.meta.get("val"), Tensor):
            check(not operands or node.target is torch.ops.aten.sym_size.int, "it gives no tensor")
            return None
        target = node.target
        check(isinstance(target, OpOverload), "it is no operator of torch")
        assert isinstance(target, OpOverload)
        check(not target._schema.is_mutable, "it writes into a tensor")
        rule, (args, kwargs) = RULES.get(target), node.meta.get("arguments", (node.args, node.kwargs))
        arguments = by_name(target, args, kwargs)
        sized = any(self.counts(n) for n in node.all_input_nodes)
        if not sized and not any(map(self.tracked, operands)) and not self.open(node.meta["val"]):
            check(target not in random.RULES, "it draws random numbers")
            return None
        if rule is None:
            raise SamplesMix("it may mix samples")
        check(not sized or rule in TAKE_SIZES, "it uses the number of samples")
        differs = rule is not broadcast and contains(arguments, MemberScalars)
        check(not differs, "its numbers differ between members")
        at = rule(SampledCall(arguments, self.where, self.shape, self.shape(node.meta["val"]), self.samples))
        several = not isinstance(node.meta["val"], Tensor) and isinstance(at, SampleDim)
        return tuple([at] * len(node.meta["val"])) if several else at

    def tracked(self, node: fx.Node) -> bool:
        return contains(self.where[node], SampleDim)

    def counts(self, node: fx.Node) -> bool:
        """True if a value is a number that is computed from the number of samples."""
        value = node.meta.get("val")
        number = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        return number and bool(self.size(value).has(self.samples))

    def open(self, example: Any) -> bool:
        return any(self.size(size).has(self.samples) for tensor in leaves(example, Tensor) for size in tensor.shape)

    def compare(self, node: fx.Node) -> None:
        """Raise if the shape of a value does not agree with its dim of samples."""
        value = node.meta.get("val")
        examples = value if isinstance(value, list | tuple) else [value]
        places = self.where[node] if isinstance(self.where[node], tuple) else None
        for k, example in enumerate(examples):
            if not isinstance(example, Tensor):
                continue
            at = places[k] if places is not None else self.where[node]
            shape = self.shape(example)
            dims = [dim for dim, size in enumerate(shape) if size.has(self.samples)]
            check(dims == ([] if at is None else [at.dim]), "its shape depends on the number of samples")
            if at is not None:
                expected = at.outer * self.samples * at.inner
                check(sympy.expand(shape[at.dim] - expected) == 0, "its shape depends on the number of samples")

    def outputs(self, graph: fx.Graph) -> tuple[int | None, ...]:
        (results,) = next(iter(reversed(graph.nodes))).args
        return tuple(map(self.output, results))

    def output(self, result: Any) -> int | None:
        if not isinstance(result, fx.Node):
            check(not contains(result, fx.Node), "an output has several shapes")
            return None
        check(not self.counts(result), "forward returns the number of samples")
        at: SampleDim | None = self.where[result]
        check(at is None or at.outer == at.inner == 1, "an output merges samples with other dims")
        return None if at is None else at.dim


def _expression(size: Any) -> Any:
    return sympy.sympify(size if isinstance(size, int | float) else size.node.expr)


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removesuffix(".default")

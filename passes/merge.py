"""Merge the graphs of different members into one: common calls are made once, the rest for the members that make them.

Every call of every graph is kept, in its order. Calls of several graphs that are alike become one call of all members
of these, whose operands are gathered where they come from different calls. So a merged graph computes what the graphs
compute, however they were laid over one another; how well they fit only decides how much is done together.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

from hfusion.core.errors import FusionError
from hfusion.core.program import Kind, Slot
from hfusion.core.tree import leaves
from hfusion.ops.rule import MemberScalars, hint
from hfusion.passes.align import of_first, results_of
from hfusion.passes.candidates import by_name
from hfusion.passes.gather import GATHER, PUT, width
from hfusion.passes.islands import OPAQUE
from hfusion.passes.laid_over import Operands, signature, size_of, woven
from hfusion.passes.side_effects import has_effect, written_inputs

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class VariantGraph:
    """The common graph of ``members``, in ascending order, whose forwards do the same; ``slots``: its placeholders'."""

    members: tuple[int, ...]
    graph: fx.Graph
    slots: tuple[Slot, ...]


@dataclass(frozen=True, eq=False)
class Merged:
    """A merged graph, and its placeholders' slots.

    ``common``: the parameters that nodes of all members read. ``partial``: those that some
    members lack. ``apart``: a graph of the same placeholders in which each variant is computed separately.
    """

    graph: fx.Graph
    apart: fx.Graph
    slots: tuple[Slot, ...]
    common: frozenset[str]
    partial: frozenset[str]


def merge(
    variants: Sequence[VariantGraph],
    shapes: Mapping[str, torch.Size],
    inputs: Mapping[Slot, tuple[int, ...]] | None = None,
) -> Merged:
    """Merge the graphs of several variants.

    Args:
        shapes: the shape ``[*T]`` of a row, for each stack in which some member's own tensor is smaller than its row.
        inputs: the members whose rows an input holds, for each input that does not hold all.

    Raises:
        FusionError: a graph holds what cannot run for some members only, or the results differ in kind.
    """
    for variant in variants:
        for node in variant.graph.nodes:
            if node.target is OPAQUE:
                raise FusionError("a part of forward can only run as the members' own code, which must be the same")
            if node.op == "call_function" and has_effect(node) and not isinstance(node.target, OpOverload):
                raise FusionError(
                    f"forward sets autocast ({node.name}), which cannot hold for some members only, and their forwards "
                    "differ: set it around the call of the array, or fuse models of one forward"
                )
    partial, inputs = _partial(variants), inputs or {}
    apart = _Merge(variants, shapes, inputs, apart=True).run(partial).graph
    return replace(_Merge(variants, shapes, inputs).run(partial), apart=apart)


def _partial(variants: Sequence[VariantGraph]) -> frozenset[str]:
    """Return the parameters that the outputs of some variants depend on and that the other variants do not have.

    Raises FusionError if another variant has such a parameter and does not use it: in that model alone, the parameter
    has no gradient, and is not decayed.
    """
    trained = [_trained(variant) for variant in variants]
    every = frozenset().union(*trained)
    for number, variant in enumerate(variants):
        for slot in variant.slots:
            if slot.kind is Kind.PARAMETER and slot.name in every - trained[number]:
                other = next(v for v, names in zip(variants, trained, strict=True) if slot.name in names)
                raise FusionError(
                    f"the output depends on {slot.name} in model {other.members[0]} and not in model "
                    f"{variant.members[0]}, which has one; leave it out of the models that do not use it"
                )
    return frozenset(name for name in every if not all(name in names for names in trained))


def _trained(variant: VariantGraph) -> frozenset[str]:
    """Return the parameters that outputs depend on, except through `detach`, which stops gradients."""
    reached: set[fx.Node] = set()
    for node in reversed(variant.graph.nodes):
        if node.op == "output" or (node in reached and node.target is not aten.detach.default):
            reached |= set(node.all_input_nodes)
    pairs = zip(variant.graph.find_nodes(op="placeholder"), variant.slots, strict=True)
    return frozenset(slot.name for node, slot in pairs if node in reached and slot.kind is Kind.PARAMETER)


class _Merge:
    """Writes the merged graph; ``env[v]`` maps the nodes of variant v's graph to those of the merged graph."""

    def __init__(
        self,
        variants: Sequence[VariantGraph],
        shapes: Mapping[str, torch.Size],
        inputs: Mapping[Slot, tuple[int, ...]],
        apart: bool = False,
    ) -> None:
        self.variants, self.shapes, self.inputs, self.apart = variants, shapes, inputs, apart
        self.members = tuple(sorted(member for variant in variants for member in variant.members))
        self.graph = fx.Graph()
        self.env: list[dict[fx.Node, fx.Node]] = [{} for _ in variants]
        self.slots: dict[Slot, fx.Node] = {}
        self.slot_of: list[dict[fx.Node, Slot]] = []
        self.gathered: dict[Any, fx.Node] = {}
        self.writing: frozenset[fx.Node] = frozenset()

    def run(self, partial: frozenset[str]) -> Merged:
        self._placeholders()
        for entry in self._one_by_one() if self.apart else self._laid_over():
            for part in self._alike_sources(entry):
                self._emit(part)
        self._output()
        self.graph.lint()
        common = frozenset(
            slot.name
            for slot, node in self.slots.items()
            if any(user.target is not GATHER and width(user, -1) == -1 for user in node.users)
        )
        return Merged(self.graph, self.graph, tuple(self.slots), common, partial)

    def _placeholders(self) -> None:
        """Create one placeholder for each tensor that some member has, with the inputs last."""
        for variant in self.variants:
            pairs = zip(variant.graph.find_nodes(op="placeholder"), variant.slots, strict=True)
            self.slot_of.append(dict(pairs))
        slot_nodes = [(slot, node) for slots in self.slot_of for node, slot in slots.items()]
        for slot, node in sorted(slot_nodes, key=lambda pair: int(pair[0].name) if pair[0].kind is Kind.INPUT else -1):
            if slot not in self.slots:
                new = self.graph.placeholder(self._name(node.name))
                new.meta.update(node.meta)
                if slot in self.inputs:
                    new.meta["rows"] = self.inputs[slot]
                if slot.name in self.shapes and slot.kind is not Kind.INPUT:
                    new.meta["val"] = _widened(node.meta["val"], self.shapes[slot.name])
                self.slots[slot] = new
        for env, slots in zip(self.env, self.slot_of, strict=True):
            env |= {node: self.slots[slot] for node, slot in slots.items()}

    def _name(self, name: str) -> str:
        used_names = {node.name for node in self.slots.values()}
        return name if name not in used_names else f"{name}_{len(used_names)}"

    def _one_by_one(self) -> list[Operands]:
        """Return the calls of all graphs, one graph after the other."""
        graphs = enumerate(variant.graph for variant in self.variants)
        return [{number: node} for number, graph in graphs for node in graph.nodes if node.op == "call_function"]

    def _laid_over(self) -> list[Operands]:
        """Return the calls of all graphs in an order that is valid for each; matching calls share an entry."""
        rows = [
            [(signature(node, slots), node) for node in variant.graph.nodes if node.op == "call_function"]
            for variant, slots in zip(self.variants, self.slot_of, strict=True)
        ]
        entries: list[tuple[Any, Operands]] = [(signature, {0: node}) for signature, node in rows[0]]
        for number, calls in enumerate(rows[1:], start=1):
            entries = woven(entries, number, calls)
        return [entry for _, entry in entries]

    def _alike_sources(self, entry: Operands) -> list[Operands]:
        """Divide ``entry`` by the sources of operands that are not tensors, since these cannot be gathered."""
        parts: dict[Any, Operands] = {}
        for number, node in entry.items():
            sources = [self.env[number][n] for n in node.all_input_nodes if not isinstance(n.meta.get("val"), Tensor)]
            parts.setdefault(tuple(sources), {})[number] = node
        return list(parts.values())

    def _emit(self, part: Operands) -> None:
        """Emit one call that computes the nodes in ``part`` for the members of their variants."""
        number, first = next(iter(part.items()))
        rows = tuple(sorted(member for n in part for member in self.variants[n].members))
        if first.target is operator.getitem:
            # An item has the members of the value that it is taken from.
            source = self.env[number][first.args[0]]
            new = self.graph.call_function(operator.getitem, (source, first.args[1]))
            self._finish(new, part, source.meta.get("rows", self.members))
            return
        written = self._written(part, rows)
        if first.target is aten.copy_.default and written:
            value = self._operand({n: node.args[1] for n, node in part.items()}, rows)
            new = self.graph.call_function(PUT, (written[0], value, list(rows)))
            self._finish(new, part, rows)
            self._forget(written)
            return
        self.writing = frozenset(written)
        args, kwargs, scalars = self._arguments(part, rows)
        self.writing = frozenset()
        new = self.graph.call_function(first.target, args, kwargs)
        if scalars is not None:
            new.meta["arguments"] = scalars
        self._finish(new, part, rows)
        stacks = [self.env[number][node] for node in written_inputs(first)] if written else []
        for stack, copy in zip(stacks, written_inputs(new), strict=True) if written else ():
            if stack in written:
                back = self.graph.call_function(PUT, (stack, copy, list(rows)))
                back.meta.update(copy.meta)
        self._forget(written)

    def _written(self, part: Operands, rows: tuple[int, ...]) -> list[fx.Node]:
        """Return the stacks that a call writes to through copies of some rows, or of a part of each row."""
        number, first = next(iter(part.items()))
        stacks = [(self.slot_of[number].get(node), self.env[number][node]) for node in written_inputs(first)]
        return [s for slot, s in stacks if slot is None or rows != self.members or slot.name in self.shapes]

    def _forget(self, written: Sequence[fx.Node]) -> None:
        """Forget gathered rows of the ``written`` stacks, so that later reads gather them again."""
        self.gathered = {key: node for key, node in self.gathered.items() if not set(key[0]) & set(written)}

    def _finish(self, new: fx.Node, part: Operands, rows: tuple[int, ...]) -> None:
        first = next(iter(part.values()))
        new.meta |= {key: value for key, value in first.meta.items() if key not in ("arguments", "members", "rows")}
        if rows != self.members:
            new.meta["rows"] = rows
        for number, node in part.items():
            self.env[number][node] = new

    def _arguments(self, part: Operands, rows: tuple[int, ...]) -> tuple[Any, Any, Any]:
        """Return args and kwargs of the call, and both with `MemberScalars` (None if no scalar differs)."""
        first = next(iter(part.values()))
        nests = {number: node.meta.get("arguments", (node.args, node.kwargs)) for number, node in part.items()}
        if not isinstance(first.target, OpOverload):
            args, kwargs = self._merged(nests, rows)
            return map_aggregate(args, of_first), map_aggregate(kwargs, of_first), None
        named = self._merged({n: by_name(first.target, *nest) for n, nest in nests.items()}, rows)
        plain = map_aggregate(named, of_first)
        schema = first.target._schema.arguments
        args = tuple(plain[p.name] for p in schema if not p.kwarg_only)
        kwargs = {p.name: plain[p.name] for p in schema if p.kwarg_only}
        return args, kwargs, ((), named) if any(leaves(named, MemberScalars)) else None

    def _merged(self, items: Operands, rows: tuple[int, ...]) -> Any:
        """One argument of all variants, which are alike but for numbers."""
        head = next(iter(items.values()))
        if isinstance(head, fx.Node):
            return self._operand(items, rows)
        if isinstance(head, list | tuple) and not isinstance(head, torch.Size):
            columns = [{n: item[k] for n, item in items.items()} for k in range(len(head))]
            merged = [self._merged(column, rows) for column in columns]
            return merged if isinstance(head, list) else tuple(merged)
        if isinstance(head, dict):
            return {name: self._merged({n: item[name] for n, item in items.items()}, rows) for name in head}
        values: dict[int, Any] = {}
        for number, item in items.items():
            members = self.variants[number].members
            variant_values = item.values if isinstance(item, MemberScalars) else [item] * len(members)
            values |= dict(zip(members, variant_values, strict=True))
        texts = {(type(value), repr(value)) for value in values.values()}
        return head if len(texts) == 1 and not isinstance(head, MemberScalars) else _scalars(values, rows)

    def _operand(self, nodes: Operands, rows: tuple[int, ...]) -> fx.Node:
        """Return the operand of ``rows``, each taken from the node of its variant."""
        number, first = next(iter(nodes.items()))
        slot = self.slot_of[number].get(first)
        sources = {self.env[n][node]: None for n, node in nodes.items()}
        source = next(iter(sources))
        if not isinstance(first.meta.get("val"), Tensor):
            return source
        is_padded = slot is not None and slot.kind is not Kind.INPUT and slot.name in self.shapes
        if len(sources) == 1 and source.meta.get("rows", self.members) == rows and not is_padded:
            return source
        gathered = self._gather(nodes, list(sources), rows)
        return self._leading(gathered, first.meta["val"]) if is_padded else gathered

    def _gather(self, nodes: Operands, sources: list[fx.Node], rows: tuple[int, ...]) -> fx.Node:
        of_member = {m: self.env[n][node] for n, node in nodes.items() for m in self.variants[n].members}
        held = {source: source.meta.get("rows", self.members) for source in sources}
        picks = [number for row in rows for number in (sources.index(of_member[row]), held[of_member[row]].index(row))]
        written = not self.writing.isdisjoint(sources)
        key = tuple(sources), tuple(picks), (rows, written)
        if key not in self.gathered:
            new = self.graph.call_function(GATHER, (sources, [len(held[s]) for s in sources], picks, written))
            new.meta |= {k: v for k, v in sources[0].meta.items() if k in ("val", "stack_trace", "nn_module_stack")}
            if rows != self.members:
                new.meta["rows"] = rows
            self.gathered[key] = new
        return self.gathered[key]

    def _leading(self, node: fx.Node, example: Tensor) -> fx.Node:
        """The part of a member's row that its own tensor, ``example``, fills."""
        key = ((node,), tuple(example.shape), "leading")
        if key in self.gathered:
            return self.gathered[key]
        rows = node.meta.get("rows")
        for dim, size in enumerate(example.shape):
            wide = node.meta["val"]
            if wide.shape[dim] != size:
                node = self.graph.call_function(aten.slice.Tensor, (node, dim, 0, size))
                with wide.fake_mode:
                    node.meta["val"] = aten.slice.Tensor(wide, dim, 0, size)
                if rows is not None:
                    node.meta["rows"] = rows
        self.gathered[key] = node
        return node

    def _output(self) -> None:
        outputs = [next(iter(reversed(variant.graph.nodes))) for variant in self.variants]
        columns = list(zip(*map(results_of, outputs), strict=True))
        results = tuple(self._result(index, dict(enumerate(column))) for index, column in enumerate(columns))
        self.graph.output(map_aggregate(results, of_first)).meta["arguments"] = ((results,), {})

    def _result(self, index: int, column: Operands) -> Any:
        """One result of all members; where its shapes differ, a list of a node for the members of each shape."""
        groups: dict[Any, Operands] = {}
        for number, item in column.items():
            kind, shape = _result(item)
            groups.setdefault(shape, {})[number] = item
            if kind != _result(column[0])[0]:
                first_member, other = self.variants[0].members[0], self.variants[number].members[0]
                raise FusionError(
                    f"forward returns {_describe_result(column[0])} in model {first_member} and "
                    f"{_describe_result(item)} in model {other} as result {index}, which an array cannot stack"
                )
        first = column[0]
        if not isinstance(first, fx.Node):
            return self._merged(column, self.members)
        if not isinstance(first.meta.get("val"), Tensor):
            if len({self.env[number][item] for number, item in column.items()}) > 1:
                raise FusionError(f"forward returns a number as result {index} that members compute differently")
            return self.env[0][first]
        rows = [tuple(sorted(m for n in group for m in self.variants[n].members)) for group in groups.values()]
        results = [self._operand(group, group_rows) for group, group_rows in zip(groups.values(), rows, strict=True)]
        return results[0] if len(results) == 1 else results


def _result(item: Any) -> tuple[Any, Any]:
    """The kind of a result, equal where an array can give both, and its shape, equal where it can stack them."""
    value = item.meta.get("val") if isinstance(item, fx.Node) else None
    if not isinstance(value, Tensor):
        return "a value" if not isinstance(item, fx.Node) else type(value).__name__, None
    return (value.dtype, value.device), tuple(map(size_of, value.shape))


def _describe_result(item: Any) -> str:
    """Return a text with the dtype and shape of a result, or its kind."""
    value = item.meta.get("val") if isinstance(item, fx.Node) else None
    if not isinstance(value, Tensor):
        return str(_result(item)[0])
    sizes = ", ".join(str(size) if isinstance(size, int) else str(hint(size)) for size in value.shape)
    return f"a {value.dtype} of shape ({sizes})"


def _scalars(values: Mapping[int, Any], rows: Sequence[int]) -> MemberScalars:
    return MemberScalars(tuple(values[row] for row in rows))


def _widened(example: Any, shape: Sequence[int]) -> Any:
    """The example of a row of a stack, of which a member's own tensor is a part."""
    with example.fake_mode:
        wide = torch.empty(tuple(shape), dtype=example.dtype, device=example.device)
    return wide.requires_grad_(example.requires_grad)

"""Rewrite one member's graph into the graph of the whole array, node by node."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from hfusion.errors import FusionError
from hfusion.layout import CONVERSIONS, COPYING, Layout, Listed, lift, lift_packed
from hfusion.ops import RULES
from hfusion.ops.generic import generic
from hfusion.ops.rule import (
    Call,
    Operand,
    PerMember,
    RuleTable,
    Scalar,
    Site,
    Value,
    has_per_member,
    is_random,
    values,
)
from hfusion.passes.functional import RUNNING_STATISTICS

Result = Value | Scalar | None


@dataclass(frozen=True)
class Emitter:
    """Writes into the graph of the array, and makes every transition between layouts once."""

    graph: fx.Graph
    members: int
    transitions: dict[tuple[fx.Node, Layout, int | None], fx.Node]

    def call(self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        return self.graph.call_function(fn, self.lower(args), dict(self.lower(kwargs)))

    def lower(self, arguments: Any) -> Any:
        """Replace the rules' vocabulary by nodes."""
        if isinstance(arguments, Operand):
            return self.operand(arguments)
        if isinstance(arguments, Value | Scalar):
            return arguments.node
        if isinstance(arguments, PerMember):
            node = self.graph.call_function(per_member, arguments.values)
            node.meta.update(layout=Layout.LISTED, how="scalars", transition=True)
            return node
        if isinstance(arguments, Mapping):
            return {name: self.lower(item) for name, item in arguments.items()}
        if isinstance(arguments, list | tuple):
            return type(arguments)(self.lower(item) for item in arguments)
        return arguments

    def operand(self, operand: Operand) -> fx.Node:
        value, wanted, rank = operand.value, operand.layout, operand.rank
        key = (value.node, wanted, rank)
        if key not in self.transitions:
            self.transitions[key] = self._transition(value, wanted, rank)
        return self.transitions[key]

    def _transition(self, value: Value, wanted: Layout, rank: int | None) -> fx.Node:
        lower_rank = rank is not None and value.rank < rank
        if wanted is Layout.PACKED and lower_rank:
            return self._insert(lift_packed, self.operand(value.to(Layout.STACKED)), rank, value, wanted)
        node = value.node
        if value.layout is not wanted:
            conversion = CONVERSIONS.get((value.layout, wanted))
            if conversion is None:
                raise FusionError(f"{value.node} is {value.layout.value} and cannot become {wanted.value}")
            node = self._insert(conversion, node, self.members, value, wanted)
        if wanted is Layout.STACKED and lower_rank:
            node = self._insert(lift, node, rank, value, wanted)
        return node

    def _insert(self, fn: Any, node: fx.Node, number: int | None, value: Value, layout: Layout) -> fx.Node:
        new = self.graph.call_function(fn, (node, number))
        new.meta.update(layout=layout, example=value.example, how="copy" if fn in COPYING else "view", transition=True)
        return new


def per_member(*values: Any) -> Listed:
    """One scalar per member, for a loop over members."""
    return Listed(values)


def batch(
    graph: fx.Graph,
    layouts: Sequence[Layout],
    members: int,
    rules: RuleTable = RULES,
) -> fx.GraphModule:
    """The array's graph for a member's ``graph`` whose placeholders have ``layouts``.

    Arguments that differ between members stand in ``node.meta["arguments"]`` as ``(args, kwargs)`` with `PerMember`
    entries. Every node of the result tells its ``layout``, the member's ``example``, ``how`` it is computed and its
    ``origin``, the member's node.
    """
    emitter = Emitter(fx.Graph(), members, {})
    env: dict[fx.Node, Result] = {}
    waiting = iter(layouts)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = _placeholder(emitter, node, next(waiting))
        elif node.op == "call_function":
            env[node] = _rewrite(emitter, node, env, rules)
        elif node.op == "output":
            _output(emitter, node, env)
        else:
            raise FusionError(f"{node.op} {node.target} stands in a captured graph; only calls are expected")
    emitter.graph.lint()
    return fx.GraphModule(torch.nn.Module(), emitter.graph)


def _placeholder(emitter: Emitter, node: fx.Node, layout: Layout) -> Result:
    new = emitter.graph.placeholder(node.name)
    new.meta.update(layout=layout, example=node.meta.get("val"), origin=node, how="input")
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return Scalar(new, node.meta.get("val"))
    return Value(new, layout, node.meta["val"])


def _rewrite(emitter: Emitter, node: fx.Node, env: dict[fx.Node, Result], rules: RuleTable) -> Result:
    args, kwargs = node.meta.get("arguments", (node.args, node.kwargs))
    args, kwargs = _bind(args, env), _bind(kwargs, env)
    call = _call_of(emitter, node, args, kwargs, rules)
    new = emitter.call(call.fn, call.args, call.kwargs)
    new.meta.update(layout=call.layout, example=node.meta.get("val"), how=call.how, origin=node)
    if call.layout is Layout.SHARED and not _holds_tensor(node.meta.get("val")):
        return Scalar(new, node.meta.get("val"))
    return Value(new, call.layout, node.meta["val"])


def _call_of(emitter: Emitter, node: fx.Node, args: Any, kwargs: Any, rules: RuleTable) -> Call:
    target = node.target
    if target is operator.getitem:
        return _getitem(args)
    batched = any(not v.shared for v in values((args, kwargs))) or has_per_member((args, kwargs))
    if not isinstance(target, OpOverload):
        if batched or isinstance(target, str):
            raise FusionError(f"{target} at {node.format_node()} works on tensors but is no ATen operator")
        return Call(target, args, Layout.SHARED, "shared", kwargs)
    arguments = by_name(target, args, kwargs)
    if not batched and not is_random(target, arguments) and not _writes_shared(target, arguments):
        return Call(target, args, Layout.SHARED, "shared", kwargs)
    site = Site(target, emitter.members, node.meta.get("val"))
    rule = rules.get(target)
    call = rule(site, **arguments) if rule is not None else None
    return call if call is not None else generic(site, arguments)


def _writes_shared(target: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether a call on shared tensors only writes into one, once instead of once per member; its rule refuses it."""
    if target in RUNNING_STATISTICS:
        training = arguments.get("training", arguments.get("use_input_stats"))
        return bool(training) and arguments["running_mean"] is not None
    return target._schema.is_mutable


def _getitem(args: tuple[Any, ...]) -> Call:
    source, index = args
    if isinstance(source, Value) and source.layout is Layout.LISTED:
        return Call(pick, (source, index), Layout.LISTED, "listed")
    layout = source.layout if isinstance(source, Value) else Layout.SHARED
    return Call(operator.getitem, args, layout, layout.value)


def pick(value: Listed, index: int) -> Listed:
    """Each member's ``index``-th result of an operator that gives several."""
    return Listed(row[index] for row in value)


def by_name(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an ATen call by name, with the schema's defaults."""
    named: dict[str, Any] = {}
    for position, parameter in enumerate(target._schema.arguments):
        if parameter.name in kwargs:
            named[parameter.name] = kwargs[parameter.name]
        elif position < len(args):
            named[parameter.name] = args[position]
        else:
            named[parameter.name] = parameter.default_value
    return named


def _bind(arguments: Any, env: dict[fx.Node, Result]) -> Any:
    if isinstance(arguments, fx.Node):
        return env[arguments]
    if isinstance(arguments, Mapping):
        return {name: _bind(item, env) for name, item in arguments.items()}
    if isinstance(arguments, list | tuple):
        bound = [_bind(item, env) for item in arguments]
        return bound if isinstance(arguments, list) else tuple(bound)
    return arguments


def _holds_tensor(example: Any) -> bool:
    if isinstance(example, list | tuple):
        return any(_holds_tensor(item) for item in example)
    return isinstance(example, torch.Tensor)


def _output(emitter: Emitter, node: fx.Node, env: dict[fx.Node, Result]) -> None:
    results = []
    for item in node.args[0]:  # type: ignore[union-attr]
        bound = _bind(item, env)
        results.append(bound.to(Layout.STACKED) if isinstance(bound, Value) else bound)
    emitter.graph.output(tuple(emitter.lower(results)))

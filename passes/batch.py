"""Rewrite one member's graph into the graph of the whole array, node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from hfusion.core.errors import FusionError
from hfusion.core.layout import COPYING, Layout, Listed
from hfusion.ops import RULES
from hfusion.ops.lowering import Lowering, View
from hfusion.ops.rule import MemberScalars, Operand, RuleTable, Scalar, Value
from hfusion.ops.saved import NOTHING
from hfusion.passes.candidates import Result, bind, candidates, result, route
from hfusion.passes.layouts import Choice


@dataclass(frozen=True)
class Emitter:
    """Writes into the graph of the array, and makes every transition between layouts once."""

    graph: fx.Graph
    members: int
    transitions: dict[tuple[fx.Node, Any, int | None], fx.Node] = field(default_factory=dict)

    def call(self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        return self.graph.call_function(fn, self.lower(args), dict(self.lower(kwargs)))

    def lower(self, arguments: Any) -> Any:
        """Replace the rules' vocabulary by nodes."""
        if isinstance(arguments, Operand):
            return self.operand(arguments)
        if isinstance(arguments, Value | Scalar):
            return arguments.node
        if isinstance(arguments, MemberScalars):
            node = self.graph.call_function(per_member, arguments.values)
            node.meta.update(layout=Layout.LISTED, lowering=SCALARS, transition=True)
            return node
        if isinstance(arguments, Mapping):
            return {name: self.lower(item) for name, item in arguments.items()}
        if isinstance(arguments, list | tuple):
            return type(arguments)(self.lower(item) for item in arguments)
        return arguments

    def operand(self, operand: Operand) -> fx.Node:
        node = operand.value.node
        for fn, number, layout in route(operand, self.members):
            key = (node, fn, number)
            if key not in self.transitions:
                text, view = ("copy", View.PERHAPS) if fn in COPYING else ("view", View.ALWAYS)
                lowering = Lowering(fn, layout, text, saves=NOTHING, view=view)
                self.transitions[key] = new = self.graph.call_function(fn, (node, number))
                new.meta.update(layout=layout, example=operand.value.example, lowering=lowering, transition=True)
            node = self.transitions[key]
        return node


def per_member(*values: Any) -> Listed:
    """One scalar per member, for a loop over members."""
    return Listed(values)


SCALARS = Lowering(per_member, Layout.LISTED, "scalars", saves=NOTHING)


def batch(
    graph: fx.Graph,
    layouts: Sequence[Layout],
    members: int,
    rules: RuleTable = RULES,
    choices: Mapping[fx.Node, Choice] | None = None,
) -> fx.GraphModule:
    """Build the array's graph from a member's ``graph`` whose placeholders have ``layouts``.

    Arguments that differ between members are in ``node.meta["arguments"]`` as ``(args, kwargs)`` with `MemberScalars`
    entries. ``choices`` selects a candidate for each node, by default the first. Every node of the result has its
    ``layout``, the member's ``example`` and its node as ``origin`` in ``meta``; every call has its ``lowering``
    and, if there was one, its ``choice``.
    """
    emitter = Emitter(fx.Graph(), members)
    env: dict[fx.Node, Result] = {}
    waiting = iter(layouts)
    for node in graph.nodes:
        if node.op == "placeholder":
            layout, example = next(waiting), node.meta.get("val")
            new = emitter.graph.placeholder(node.name)
            new.meta.update(layout=layout, example=example, origin=node)
            env[node] = result(new, layout, example)
        elif node.op == "call_function":
            choice, example = (choices or {}).get(node), node.meta.get("val")
            calls = candidates(node, env, members, rules)
            call = calls[0] if choice is None else calls[choice.index]
            new = emitter.call(call.fn, call.args, call.kwargs)
            new.meta.update(layout=call.layout, example=example, lowering=call.lowering, origin=node)
            if choice is not None:
                new.meta["choice"] = choice
            env[node] = result(new, call.layout, example)
        elif node.op == "output":
            _output(emitter, node, env)
        else:
            raise FusionError(f"{node.op} {node.target} is in a captured graph; only calls are expected")
    emitter.graph.lint()
    return fx.GraphModule(torch.nn.Module(), emitter.graph)


def _output(emitter: Emitter, node: fx.Node, env: dict[fx.Node, Result]) -> None:
    def stacked(item: Any) -> Any:
        if not isinstance(item, Value) or not isinstance(item.example, torch.Tensor):
            return item
        if item.example.layout is not torch.strided:
            raise FusionError(f"forward returns a tensor of layout {item.example.layout}, which cannot be stacked")
        return item.to(Layout.STACKED)

    sources: Any = node.meta["arguments"][0][0] if "arguments" in node.meta else node.args[0]
    emitter.graph.output(tuple(emitter.lower(stacked(item)) for item in bind(sources, env)))

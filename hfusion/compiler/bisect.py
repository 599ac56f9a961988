"""Find the first node where a fused program and a member's graph give different values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hfusion.core.layout import Layout
from hfusion.core.member_random import draws_random
from hfusion.core.program import Program, source_line
from hfusion.ops.rule import MemberScalars
from hfusion.passes.gather import has_variants
from hfusion.passes.islands import OPAQUE

LIMIT = 1e-3


class _ValueRecorder(fx.Interpreter):
    """Runs a program, and records values and layouts by the nodes of the member's graph that they belong to."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, tuple[Any, Layout]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if "origin" in n.meta:
            self.values[n.meta["origin"]] = (value, n.meta["layout"])
        return value


def first_difference(
    program: Program,
    graph: fx.Graph,
    inputs: Sequence[Any],
    member: int,
    difference: Callable[[Tensor, Tensor], float],
) -> str:
    """Run both on ``inputs`` of the program, and describe the first node that differs for ``member``."""
    if has_variants(graph):
        return "members differ in submodules, so that nodes are not compared one by one"
    recorder = _ValueRecorder(program.module)
    # Copied, since the program writes into buffers.
    input_copies = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    with torch.no_grad():
        recorder.run(*inputs)
    env: dict[fx.Node, Any] = {}
    placeholders = zip(graph.find_nodes(op="placeholder"), input_copies, program.layouts, strict=True)
    for node, value, layout in placeholders:
        env[node] = row(value, layout, member, program.members)
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            continue
        fused_value = row(*recorder.values[node], member, program.members)
        if draws_random(node.target):
            env[node] = fused_value
            continue
        env[node] = expected = _evaluate(node, env, member)
        if isinstance(expected, Tensor) and expected.is_floating_point() and difference(fused_value, expected) > LIMIT:
            return f"the first node that differs is {node.name} = {node.target} at {source_line(node)}"
        env[node] = fused_value
    looped = ", or what runs in a loop over members does" if graph.find_nodes(op="call_function", target=OPAQUE) else ""
    return (
        f"no node of forward differs by itself: a gradient does, or the capture differs from the original code{looped}"
    )


def row(value: Any, layout: Layout, member: int, members: int) -> Any:
    """Return the part of a value that belongs to ``member``."""
    if isinstance(value, list | tuple) and layout is not Layout.LISTED:
        return type(value)(row(part, layout, member, members) for part in value)
    if layout is Layout.SHARED or not isinstance(value, Tensor | tuple):
        return value
    if layout is Layout.PACKED:
        return value.chunk(members, 1)[member]  # type: ignore[union-attr]
    return value[member]


def _evaluate(node: fx.Node, env: dict[fx.Node, Any], member: int) -> Any:
    args, kwargs = node.meta.get("arguments", (node.args, node.kwargs))

    def fill(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return env[item]
        if isinstance(item, MemberScalars):
            return item.values[member]
        if isinstance(item, dict):
            return {name: fill(part) for name, part in item.items()}
        if isinstance(item, list | tuple):
            return [fill(part) for part in item] if isinstance(item, list) else tuple(fill(part) for part in item)
        return item

    with torch.no_grad():
        return node.target(*fill(args), **fill(kwargs))  # type: ignore[operator]

"""Calls that run the members' own code, as one operator of a graph.

The code gets copies of its inputs, and its results are copies, so that a graph loses what it does to memory that others
read. `check_calls` refuses a graph where that matters, as far as the recorded run of one member shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.core.program import source_line

_library = torch.library.Library("hfusion", "DEF")
# ``fixed`` and ``changing`` are the submodule's own tensors. What was seen: the positions of the inputs that were
# ``written`` into, and whether a result ``shares`` memory with an input, an own tensor or another result.
_library.define(
    "opaque(Tensor[] inputs, Tensor[] fixed, Tensor(a!)[] changing, int call, int[] written, bool shares) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),
)
OPAQUE: OpOverload = torch.ops.hfusion.opaque.default


class _Memory:
    """The nodes that share memory: views, results of in-place operators, and all tensors of a call that ``shares``."""

    def __init__(self, graph: fx.Graph, viewed: Callable[[fx.Node], fx.Node | None]) -> None:
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self._above: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            source = node.args[0] if _in_place(node) else viewed(node)
            if isinstance(source, fx.Node):
                self._join(node, source)
            if node.target is OPAQUE and node.args[5]:
                for other in (*node.args[0], *node.args[1], *node.args[2], *node.users):
                    self._join(node, other)

    def _join(self, node: fx.Node, other: fx.Node) -> None:
        if self.group(node) is not self.group(other):
            self._above[self.group(node)] = self.group(other)

    def group(self, node: fx.Node) -> fx.Node:
        """Return a node that stands for all that share memory with ``node``."""
        while node in self._above:
            node = self._above[node]
        return node

    def is_read(self, target: fx.Node, call: fx.Node) -> bool:
        """Return whether memory of ``target`` from before ``call``, which writes into it, is read by it or after it."""
        began, inputs = self.position[call], list(call.args[0])  # type: ignore[arg-type]
        return any(
            node.op == "placeholder"
            or inputs.count(node) > (node is target)
            or any(self.position[user] > began for user in node.users)
            for node in self.position
            if self.position[node] < began and self.group(node) is self.group(target)
        )


def check_calls(graph: fx.Graph, viewed: Callable[[fx.Node], fx.Node | None], statistics: frozenset[Any]) -> None:
    """Raise FusionError if a call of members' own code shares memory in a way that the ``graph`` would lose.

    Args:
        graph: a graph with in-place operators.
        viewed: the node that a node is a view of.
        statistics: operators that write into their arguments 3 and 4.
    """
    calls = [node for node in graph.nodes if node.target is OPAQUE]
    if not calls:
        return
    memory = _Memory(graph, viewed)
    writes = list(_writes(graph, statistics))
    for call in calls:
        inputs: Any = call.args[0]
        label = source_line(call) or call.name
        if any(memory.is_read(inputs[position], call) for position in call.args[4]):
            raise FusionError(
                f"{label}: a call that runs in a loop over members writes into its input, which is used afterwards; "
                "let it write into a copy"
            )
        later = {memory.group(target) for node, target in writes if memory.position[node] > memory.position[call]}
        if call.args[5] and memory.group(call) in later:
            raise FusionError(
                f"{label}: a call that runs in a loop over members gives back memory that is changed in place later "
                "(its input, a view of it, a tensor of its own, or one tensor twice); give back a copy"
            )


def _in_place(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target is not OPAQUE and node.target._schema.is_mutable


def _writes(graph: fx.Graph, statistics: frozenset[Any]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each node that writes, or may write, with the one that it writes into."""
    for node in graph.nodes:
        targets: list[Any] = []
        if _in_place(node):
            targets += node.args[:1]
        if node.target in statistics:
            targets += node.args[3:5]
        if node.target is OPAQUE:
            inputs, _, changing, _, written, *_ = node.args
            targets += [*(inputs[position] for position in written), *changing]
        yield from ((node, target) for target in targets if isinstance(target, fx.Node))

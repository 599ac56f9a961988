"""Calls that run the members' own code, and what they may do to memory that the rest of a graph uses.

`OPAQUE` represents one call of a submodule in a graph. Its code is observed in a recorded run of one member only: which
inputs it wrote into, and which of its results share memory with its inputs, with its own tensors or with one another.
If that makes the graph wrong, `checked` refuses it. If another member could make it wrong at run time, `checked`
returns what the call has to watch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.core.program import source_line

_library = torch.library.Library("hfusion", "DEF")
# ``fixed`` and ``changing`` are the submodule's own tensors. ``written`` and ``links`` are what was seen: positions
# among inputs and changing; pairs of a result and a source. ``apart`` and ``alive`` come from `checked`;
# ``sizes`` are numbers among the arguments that vary.
_library.define(
    "opaque(Tensor[] inputs, Tensor[] fixed, Tensor(a!)[] changing, int call, int[] written, int[] links, "
    "int[] apart, int[] alive, SymInt[] sizes) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),
)
OPAQUE: OpOverload = torch.ops.hfusion.opaque.default

Viewed = Callable[[fx.Node], fx.Node | None]


@dataclass(frozen=True)
class Watched:
    """Constraints on a call that are checked when it runs.

    ``apart``: flat pairs of a result and a source (inputs, fixed, changing, results, counted through) that must not
    share memory; ``alive``: positions among inputs and changing that must not change.
    """

    apart: list[int]
    alive: list[int]


@dataclass(frozen=True, eq=False)
class _OwnCall:
    """One `OPAQUE` node by its parts; ``results``: those that are used, by position."""

    node: fx.Node
    inputs: Sequence[fx.Node]
    changing: Sequence[fx.Node]
    sources: Sequence[fx.Node]
    written: frozenset[int]
    links: frozenset[tuple[int, int]]
    results: Mapping[int, fx.Node]

    @staticmethod
    def of(node: fx.Node) -> _OwnCall:
        inputs, fixed, changing, _, written, links, *_ = node.args
        results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        pairs = frozenset(zip(links[::2], links[1::2], strict=True))  # type: ignore[index, arg-type]
        sources = (*inputs, *fixed, *changing)  # type: ignore[misc]
        return _OwnCall(node, inputs, changing, sources, frozenset(written), pairs, results)  # type: ignore[arg-type]

    def source(self, position: int) -> fx.Node | None:
        count = len(self.sources)
        return self.sources[position] if position < count else self.results.get(position - count)

    def observed_aliases(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Results with the sources whose memory they shared."""
        for result, position in self.links:
            result_node, source_node = self.results.get(result), self.source(position)
            if result_node is not None and source_node is not None:
                yield result_node, source_node

    def possible(self) -> Iterator[tuple[int, int, fx.Node, fx.Node]]:
        """Yield every pair of a result and a source, by position and as nodes."""
        for k, result in self.results.items():
            yield from ((k, position, result, source) for position, source in enumerate(self.sources))
            count = len(self.sources)
            yield from ((k, count + other, result, node) for other, node in self.results.items() if other < k)


class _Memory:
    """The nodes that share memory: views, and what calls were seen to give back of their inputs and own tensors."""

    def __init__(self, graph: fx.Graph, calls: Sequence[_OwnCall], viewed: Viewed) -> None:
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self._above: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            source = _written(node) if _in_place(node) else viewed(node)
            if source is not None:
                self._join(node, source)
        for call in calls:
            for result, other in call.observed_aliases():
                self._join(result, other)

    def _join(self, node: fx.Node, other: fx.Node) -> None:
        if self.group(node) is not self.group(other):
            self._above[self.group(node)] = self.group(other)

    def group(self, node: fx.Node) -> fx.Node:
        """Return a node that stands for all that share memory with ``node``."""
        while node in self._above:
            node = self._above[node]
        return node

    def is_read(self, target: fx.Node, call: _OwnCall) -> bool:
        """Return whether memory of ``target`` from before ``call``, which writes into it, is read by it or after it."""
        began, inputs = self.position[call.node], list(call.inputs)
        return any(
            node.op == "placeholder"
            or inputs.count(node) > (node is target)
            or any(self.position[user] > began for user in node.users)
            for node in self.position
            if self.position[node] < began and self.group(node) is self.group(target)
        )


def checked(graph: fx.Graph, viewed: Viewed, statistics: frozenset[Any]) -> dict[fx.Node, Watched]:
    """Return the run-time checks for each call of members' own code in a ``graph`` with in-place operators.

    Args:
        viewed: the node that a node is a view of.
        statistics: operators that write into their arguments 3 and 4.

    Raises:
        FusionError: a call was seen to share memory in a way that the graph would lose.
    """
    calls = [_OwnCall.of(node) for node in graph.nodes if node.target is OPAQUE]
    if not calls:
        return {}
    memory = _Memory(graph, calls, viewed)
    surely, maybe = _writes(graph, calls, statistics)
    given = {memory.group(result) for call in calls for result in call.results.values()}
    watched: dict[fx.Node, Watched] = {}
    for call in calls:
        _check_written(call, memory)
        after = [
            {memory.group(target) for node, target in writes if memory.position[node] > memory.position[call.node]}
            for writes in (surely, maybe)
        ]
        if any(memory.group(result) in after[0] for result, _ in call.observed_aliases()):
            raise FusionError(
                f"{_where(call.node)}: a call that runs in a loop over members gives back memory that is changed in "
                "place later (its input, a view of it, a tensor of its own, or one tensor twice); give back a copy"
            )
        later, count = after[0] | after[1], len(call.inputs)
        apart = [
            number
            for k, position, result, source in call.possible()
            if (k, position) not in call.links and not later.isdisjoint((memory.group(result), memory.group(source)))
            for number in (k, position)
        ]
        alive = [*range(count), *(count + k for k, node in enumerate(call.changing) if memory.group(node) in given)]
        watched[call.node] = Watched(apart, [position for position in alive if position not in call.written])
    return watched


def _in_place(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target is not OPAQUE and node.target._schema.is_mutable


def _written(node: fx.Node) -> fx.Node | None:
    target = node.args[0] if node.args else None
    return target if isinstance(target, fx.Node) else None


_Writes = list[tuple[fx.Node, fx.Node]]


def _writes(graph: fx.Graph, calls: Sequence[_OwnCall], statistics: frozenset[Any]) -> tuple[_Writes, _Writes]:
    """Return the writes that are certain or were seen, and those that calls might make to their own tensors.

    Each is the node that writes, and the one that it writes into.
    """
    surely, maybe = _Writes(), _Writes()
    for node in graph.nodes:
        if _in_place(node) and (target := _written(node)) is not None:
            surely.append((node, target))
        if node.target in statistics:
            surely += [(node, statistic) for statistic in node.args[3:5] if isinstance(statistic, fx.Node)]
    for call in calls:
        for position, target in enumerate((*call.inputs, *call.changing)):
            if position in call.written:
                surely.append((call.node, target))
            elif position >= len(call.inputs):
                maybe.append((call.node, target))
    return surely, maybe


def _check_written(call: _OwnCall, memory: _Memory) -> None:
    """Raise if an input that a call writes into is used afterwards: the new value does not leave the call."""
    for position in call.written:
        own = position - len(call.inputs)
        if own < 0 and memory.is_read(call.inputs[position], call):
            raise FusionError(
                f"{_where(call.node)}: a call that runs in a loop over members writes into its input, which is "
                "used afterwards; let it write into a copy"
            )
        if own >= 0 and memory.group(call.changing[own]) in map(memory.group, call.inputs):
            raise FusionError(
                f"{_where(call.node)}: a call that runs in a loop over members is given a tensor of its own and "
                "writes into it; give it a copy"
            )


def _where(node: fx.Node) -> str:
    return source_line(node) or node.name

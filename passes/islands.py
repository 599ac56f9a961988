"""Calls that run the members' own code, and what they may do to memory that the rest of a graph uses.

`OPAQUE` represents one call of a submodule in a graph. Its code is observed in a recorded run of one member only: which
inputs it wrote into, and which of its results share memory with its inputs, with its own tensors or with one another.
If that makes the graph wrong, `checked` refuses it. If another member could make it wrong at run time, `checked`
returns what the call has to watch.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
Edges = Mapping[fx.Node, Iterable[fx.Node]]


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


@dataclass(frozen=True, eq=False)
class _Memory:
    """The nodes that share memory: views, results that calls returned in the recorded run, and results they might."""

    position: Mapping[fx.Node, int]
    views: dict[fx.Node, set[fx.Node]] = field(default_factory=lambda: defaultdict(set))
    observed: dict[fx.Node, set[fx.Node]] = field(default_factory=lambda: defaultdict(set))
    possible: dict[fx.Node, set[fx.Node]] = field(default_factory=lambda: defaultdict(set))

    def read_after(self, node: fx.Node, write: _Write) -> bool:
        """True if the value of ``node`` is used after ``write``."""
        if node.op == "placeholder" or any(self.position[user] > self.position[write.node] for user in node.users):
            return True
        return write.node.target is OPAQUE and _reads(write, node)


@dataclass(frozen=True, eq=False)
class _Write:
    node: fx.Node
    target: fx.Node


def _reads(write: _Write, node: fx.Node) -> bool:
    """True if the writing call also reads ``node``, in addition to the tensor that it writes into."""
    inputs: Sequence[fx.Node] = write.node.args[0]  # type: ignore[assignment]
    return inputs.count(node) > (1 if node is write.target else 0)


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
    memory = _memory(graph, calls, viewed)
    surely, maybe = _writes(graph, calls, statistics)
    for call in calls:
        _check_written(call, memory)
        _check_observed(call, memory, surely)
    return {call.node: Watched(_apart(call, memory, [*surely, *maybe]), _alive(call, memory)) for call in calls}


def _memory(graph: fx.Graph, calls: Sequence[_OwnCall], viewed: Viewed) -> _Memory:
    memory = _Memory({node: k for k, node in enumerate(graph.nodes)})
    for node in graph.nodes:
        source = _written(node) if _in_place(node) else viewed(node)
        if source is not None:
            _join(memory.views, node, source)
    for edges in (memory.observed, memory.possible):
        edges.update({node: set(others) for node, others in memory.views.items()})
    for call in calls:
        for result, other in call.observed_aliases():
            _join(memory.observed, result, other)
        for _, _, result, other in call.possible():
            _join(memory.possible, result, other)
    return memory


def _join(edges: dict[fx.Node, set[fx.Node]], node: fx.Node, other: fx.Node) -> None:
    if node is not other:
        edges[node].add(other)
        edges[other].add(node)


def _in_place(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target is not OPAQUE and node.target._schema.is_mutable


def _written(node: fx.Node) -> fx.Node | None:
    target = node.args[0] if node.args else None
    return target if isinstance(target, fx.Node) else None


def _writes(
    graph: fx.Graph, calls: Sequence[_OwnCall], statistics: frozenset[Any]
) -> tuple[list[_Write], list[_Write]]:
    """Return the writes that are certain or were recorded, and those that calls might make to their own tensors."""
    surely, maybe = [], []
    for node in graph.nodes:
        if _in_place(node) and (target := _written(node)) is not None:
            surely.append(_Write(node, target))
        if node.target in statistics:
            surely += [_Write(node, s) for s in node.args[3:5] if isinstance(s, fx.Node)]
    for call in calls:
        for position, target in enumerate((*call.inputs, *call.changing)):
            if position in call.written:
                surely.append(_Write(call.node, target))
            elif position >= len(call.inputs):
                maybe.append(_Write(call.node, target))
    return surely, maybe


def _reached(edges: Edges, start: fx.Node, without: Callable[[fx.Node, fx.Node], bool]) -> set[fx.Node]:
    reached, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        for other in edges.get(node, ()):
            if other not in reached and not without(node, other):
                reached.add(other)
                waiting.append(other)
    return reached


def _check_written(call: _OwnCall, memory: _Memory) -> None:
    """Raise if an input that a call writes into is used afterwards: the new value does not leave the call."""
    results = set(call.results.values())
    for position in call.written:
        if position < len(call.inputs):
            write = _Write(call.node, call.inputs[position])
            around = _reached(memory.observed, write.target, lambda a, b: b in results)
            if any(memory.read_after(node, write) for node in around):
                raise FusionError(
                    f"{_where(call.node)}: a call that runs in a loop over members writes into its input, which is "
                    "used afterwards; let it write into a copy"
                )
        else:
            write = _Write(call.node, call.changing[position - len(call.inputs)])
            around = _reached(memory.observed, write.target, lambda a, b: b in results)
            if any(_reads(write, node) for node in around):
                raise FusionError(
                    f"{_where(call.node)}: a call that runs in a loop over members is given a tensor of its own and "
                    "writes into it; give it a copy"
                )


def _check_observed(call: _OwnCall, memory: _Memory, writes: Sequence[_Write]) -> None:
    for result, other in call.observed_aliases():
        if _matters(memory, memory.observed, call.node, result, other, writes):
            raise FusionError(
                f"{_where(call.node)}: a call that runs in a loop over members gives back memory that is changed in "
                "place later (its input, a view of it, a tensor of its own, or one tensor twice); give back a copy"
            )


def _matters(
    memory: _Memory, edges: Edges, call: fx.Node, result: fx.Node, other: fx.Node, writes: Sequence[_Write]
) -> bool:
    """True if after ``call``, which makes two nodes share memory, one of them is written and the other read."""

    def without(a: fx.Node, b: fx.Node) -> bool:
        return {a, b} == {result, other}

    sides = _reached(edges, result, without), _reached(edges, other, without)
    for near, far in (sides, sides[::-1]):
        for write in writes:
            later = memory.position[write.node] > memory.position[call]
            if later and write.target in near and any(memory.read_after(node, write) for node in far):
                return True
    return False


def _apart(call: _OwnCall, memory: _Memory, writes: Sequence[_Write]) -> list[int]:
    """Return the pairs of a result and a source that were not seen to share memory, and must not share any."""
    pairs: list[int] = []
    around: set[fx.Node] = set()
    for result in call.results.values():
        around |= _reached(memory.possible, result, lambda a, b: False)
    concerned = [write for write in writes if write.target in around]
    if concerned:
        for k, position, node, other in call.possible():
            if (k, position) not in call.links and _matters(memory, memory.possible, call.node, node, other, concerned):
                pairs += [k, position]
    return pairs


def _alive(call: _OwnCall, memory: _Memory) -> list[int]:
    """The inputs that matter after the call; of the changing, those with results elsewhere that would change, too."""
    results = set(call.results.values())
    positions = []
    for position, node in enumerate(call.inputs):
        around = _reached(memory.possible, node, lambda a, b: b in results)
        if position not in call.written and any(memory.read_after(n, _Write(call.node, node)) for n in around):
            positions.append(position)
    for position, node in enumerate(call.changing, start=len(call.inputs)):
        views = _reached(memory.views, node, lambda a, b: False)
        others = _reached(memory.observed, node, lambda a, b: b in results) - views
        if position not in call.written and any(memory.read_after(n, _Write(call.node, node)) for n in others):
            positions.append(position)
    return positions


def _where(node: fx.Node) -> str:
    return source_line(node) or node.name

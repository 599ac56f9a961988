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
from typing import Any, cast

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
    """One `OPAQUE` node by its parts.

    Attributes:
        results: those that are used, by position.
        sources: inputs, own tensors and results, counted through; None for a result that is not used.
        own: the position of the first of its own tensors that may change among ``targets``, the inputs and those.
    """

    node: fx.Node
    results: Mapping[int, fx.Node]
    sources: Sequence[fx.Node | None]
    targets: Sequence[fx.Node]
    own: int
    written: frozenset[int]
    links: frozenset[tuple[int, int]]

    @staticmethod
    def of(node: fx.Node) -> _OwnCall:
        inputs, fixed, changing, _, written, links, *_ = cast(Any, node.args)
        results = {cast(int, user.args[1]): user for user in node.users if user.target is operator.getitem}
        sources = (*inputs, *fixed, *changing, *map(results.get, range(max(results, default=-1) + 1)))
        pairs = frozenset(zip(links[::2], links[1::2], strict=True))
        return _OwnCall(node, results, sources, (*inputs, *changing), len(inputs), frozenset(written), pairs)

    def observed_aliases(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield results with the sources whose memory they shared."""
        for k, position in self.links:
            source = self.sources[position] if position < len(self.sources) else None
            if k in self.results and source is not None:
                yield self.results[k], source


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
    when = {node: k for k, node in enumerate(graph.nodes)}
    memory = _memory(graph, calls, viewed)
    # What writes, and into what: for certain, or by calls that were not seen to write into their own tensors.
    surely = [(node, target) for node in graph.nodes for target in _written(node, statistics)]
    surely += [(call.node, call.targets[k]) for call in calls for k in call.written]
    maybe = [(call.node, x) for call in calls for k, x in enumerate(call.targets) if k >= call.own]
    given = {memory[result] for call in calls for result in call.results.values()}
    watched: dict[fx.Node, Watched] = {}
    for call in calls:
        _check_written(call, memory, when)
        certain, possible = ({memory[x] for node, x in w if when[node] > when[call.node]} for w in (surely, maybe))
        if any(memory[result] in certain for result, _ in call.observed_aliases()):
            raise FusionError(
                f"{_where(call.node)}: a call that runs in a loop over members gives back memory that is changed in "
                "place later (its input, a view of it, a tensor of its own, or one tensor twice); give back a copy"
            )
        later, count = certain | possible, len(call.sources) - max(call.results, default=-1) - 1
        apart = [
            number
            for k, result in call.results.items()
            for position, source in enumerate(call.sources[: count + k])
            if source is not None and (k, position) not in call.links
            if not later.isdisjoint((memory[result], memory[source]))
            for number in (k, position)
        ]
        alive = [k for k, x in enumerate(call.targets) if k < call.own or memory[x] in given]
        watched[call.node] = Watched(apart, [k for k in alive if k not in call.written])
    return watched


def _memory(graph: fx.Graph, calls: Sequence[_OwnCall], viewed: Viewed) -> dict[fx.Node, fx.Node]:
    """Return for each node one that stands for all that share memory with it.

    These are views, and what calls were seen to give back of their inputs and own tensors.
    """
    above: dict[fx.Node, fx.Node] = {}

    def top(node: fx.Node) -> fx.Node:
        while node in above:
            node = above[node]
        return node

    pairs = [(node, next(_written(node), None) or viewed(node)) for node in graph.nodes]
    for node, other in [*pairs, *(pair for call in calls for pair in call.observed_aliases())]:
        if other is not None and top(node) is not top(other):
            above[top(node)] = top(other)
    return {node: top(node) for node in graph.nodes}


def _written(node: fx.Node, statistics: frozenset[Any] = frozenset()) -> Iterator[fx.Node]:
    """Yield the nodes that an operator of torch writes into."""
    written = node.args[3:5] if node.target in statistics else ()
    if isinstance(node.target, OpOverload) and node.target is not OPAQUE and node.target._schema.is_mutable:
        written = (*written, *node.args[:1])
    yield from (x for x in written if isinstance(x, fx.Node))


def _check_written(call: _OwnCall, memory: Mapping[fx.Node, fx.Node], when: Mapping[fx.Node, int]) -> None:
    """Raise if an input that a call writes into is used afterwards: the new value does not leave the call."""
    inputs, began = list(call.targets[: call.own]), when[call.node]
    for position in call.written:
        target = call.targets[position]
        if position >= call.own and memory[target] in {memory[x] for x in inputs}:
            raise FusionError(
                f"{_where(call.node)}: a call that runs in a loop over members is given a tensor of its own and "
                "writes into it; give it a copy"
            )
        # Memory from before the call that it reads, too, or that is read after it.
        if position < call.own and any(
            x.op == "placeholder" or inputs.count(x) > (x is target) or any(when[user] > began for user in x.users)
            for x in when
            if when[x] < began and memory[x] == memory[target]
        ):
            raise FusionError(
                f"{_where(call.node)}: a call that runs in a loop over members writes into its input, which is "
                "used afterwards; let it write into a copy"
            )


def _where(node: fx.Node) -> str:
    return source_line(node) or node.name

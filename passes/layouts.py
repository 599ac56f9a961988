"""Choose how every operator of a member's graph runs for the array, so that the whole costs least.

Dynamic programming over the linearised graph. The state has, for every value that is still used, its layout and the
layouts that it was converted to already, since a conversion is made once. Every candidate of a node leads from one
state to another; of two paths to one state the cheaper is kept. So the result is optimal as long as no more than
``width`` states are alive at a time, else the best that a beam of this width finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeAlias

from torch import fx

from hfusion.core.errors import FusionError
from hfusion.core.layout import Conversion, Layout
from hfusion.ops.lowering import Lowering
from hfusion.ops.rule import Call, RuleTable, Value
from hfusion.passes.candidates import candidates, conversion, operands, reached, result

# States kept from one operator to the next. Exact for what residual and branching networks have alive.
WIDTH = 32


@dataclass(frozen=True)
class Choice:
    """The candidate that a node takes: its ``index`` among them, its estimated seconds; ``lost``: the others."""

    index: int
    price: float
    lost: tuple[tuple[Lowering, float], ...] = ()


class Pricing(Protocol):
    """Prices of calls and conversions, backward included."""

    def call(self, node: fx.Node, call: Call) -> float:
        """Return the seconds of ``call``, a candidate of a member's ``node``; operands are member nodes."""

    def move(self, value: Value, convert: Conversion) -> float:
        """Return the seconds to convert ``value`` to another layout by ``convert``."""


@dataclass(frozen=True, eq=False)
class Held:
    """A value that is still used: its layout, and the layouts that it was already converted to.

    Equal instances are one object, made by `held`: states are compared more often than anything else here.
    """

    layout: Layout
    converted: frozenset[Layout]


@cache
def held(layout: Layout, converted: frozenset[Layout] = frozenset()) -> Held:
    return Held(layout, converted)


@dataclass(frozen=True, eq=False)
class Path:
    """The cheapest way to reach a state: its cost, its last decision, and the path before that decision."""

    cost: float
    decision: tuple[fx.Node, Choice] | None = None
    previous: Path | None = None


@dataclass(frozen=True)
class Option:
    """One candidate of a node: its result's layout, its choice, and the conversions that it needs."""

    layout: Layout
    choice: Choice
    needs: tuple[tuple[fx.Node, Layout, float], ...]


# One entry for each value that is alive, in the same order in all states.
State: TypeAlias = tuple[Held, ...]


def choose(
    graph: fx.Graph, layouts: Sequence[Layout], members: int, rules: RuleTable, price: Pricing, width: int = WIDTH
) -> dict[fx.Node, Choice]:
    """Return the cheapest choices for all calls of a member's ``graph`` whose placeholders have ``layouts``.

    Raises FusionError where no array can compute a node, whatever is chosen before it.
    """
    last = {source: index for index, node in enumerate(graph.nodes) for source in node.all_input_nodes}
    # Inputs are no part of a state before they are used: a deep network has hundreds.
    waiting = dict(zip(graph.find_nodes(op="placeholder"), layouts, strict=True))
    alive: list[fx.Node] = []
    states: dict[State, Path] = {(): Path(0.0)}
    for index, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            continue
        new = [source for source in node.all_input_nodes if source in waiting]
        if new:
            first = tuple([held(waiting.pop(source)) for source in new])
            states = {(*state, *first): path for state, path in states.items()}
            alive += new
        if node.op == "call_function":
            states = _advance(node, alive, states, _NodeOptions(node, members, rules, price))
        elif node.op == "output":
            end: Path | None = min(_finished(node, alive, states, price), key=lambda path: path.cost)
            decisions: dict[fx.Node, Choice] = {}
            while end is not None:
                if end.decision is not None:
                    decisions.update([end.decision])
                end = end.previous
            return decisions
        else:
            raise FusionError(f"{node.op} {node.target} is in a captured graph; only calls are expected")
        alive.append(node)
        keep = [k for k, value in enumerate(alive) if last.get(value, -1) > index]
        # Values that are no longer used are dropped; of states that become equal, the cheapest is kept.
        narrowed: dict[State, Path] = {}
        for state, path in states.items():
            less = tuple([state[k] for k in keep])
            if less not in narrowed or path.cost < narrowed[less].cost:
                narrowed[less] = path
        if len(narrowed) > width:
            narrowed = dict(sorted(narrowed.items(), key=lambda item: item[1].cost)[:width])
        states, alive = narrowed, [alive[k] for k in keep]
    raise FusionError("a captured graph has no output")


class _NodeOptions:
    """The options of one node, computed once for each combination of its operands' layouts."""

    def __init__(self, node: fx.Node, members: int, rules: RuleTable, price: Pricing) -> None:
        self.node = node
        self.inputs = node.all_input_nodes
        self.members, self.rules, self.price = members, rules, price
        self.cached_options: dict[tuple[Layout, ...], Sequence[Option] | FusionError] = {}

    def options(self, layouts: tuple[Layout, ...]) -> Sequence[Option] | FusionError:
        if layouts not in self.cached_options:
            try:
                self.cached_options[layouts] = self._options(layouts)
            except FusionError as error:
                self.cached_options[layouts] = error
        return self.cached_options[layouts]

    def _options(self, layouts: tuple[Layout, ...]) -> Sequence[Option]:
        inputs = zip(self.inputs, layouts, strict=True)
        env = {node: result(node, layout, node.meta.get("val")) for node, layout in inputs}
        calls = candidates(self.node, env, self.members, self.rules)
        prices = [self.price.call(self.node, call) for call in calls]
        options = []
        for k, call in enumerate(calls):
            lost = tuple((other.lowering, prices[j]) for j, other in enumerate(calls) if j != k)
            needs = {}
            for operand in operands((call.args, call.kwargs)):
                convert = conversion(operand.value, reached(operand))
                if convert is not None:
                    needs[operand.value.node, reached(operand)] = self.price.move(operand.value, convert)
            costs = tuple((*conversion_key, cost) for conversion_key, cost in needs.items())
            options.append(Option(call.layout, Choice(k, prices[k], lost), costs))
        return options


def _advance(
    node: fx.Node, alive: Sequence[fx.Node], states: Mapping[State, Path], node_options: _NodeOptions
) -> dict[State, Path]:
    """Return the states after ``node``; the last entry of each is the value of ``node``."""
    index_of = {value: k for k, value in enumerate(alive)}
    inputs = [index_of[source] for source in node_options.inputs]
    new_states: dict[State, Path] = {}
    refusal: FusionError | None = None
    for state, path in states.items():
        options = node_options.options(tuple([state[k].layout for k in inputs]))
        if isinstance(options, FusionError):
            refusal = refusal or options
            continue
        for option in options:
            after, cost = _converted(state, index_of, option.needs)
            cost += path.cost + option.choice.price
            key = (*after, held(option.layout))
            if key not in new_states or cost < new_states[key].cost:
                new_states[key] = Path(cost, (node, option.choice), path)
    if not new_states and refusal is not None:
        raise refusal
    return new_states


def _converted(
    state: State, index_of: Mapping[fx.Node, int], needs: Sequence[tuple[fx.Node, Layout, float]]
) -> tuple[State, float]:
    """Return the state after the conversions in ``needs``, and the cost of those that were not made before."""
    cost, after = 0.0, list(state)
    for node, layout, seconds in needs:
        held_value = after[index_of[node]]
        if layout not in held_value.converted:
            after[index_of[node]] = held(held_value.layout, held_value.converted | {layout})
            cost += seconds
    return tuple(after), cost


def _finished(node: fx.Node, alive: Sequence[fx.Node], states: Mapping[State, Path], price: Pricing) -> list[Path]:
    """Return the complete paths, with the cost of converting outputs to the stacked layout."""
    index_of = {value: k for k, value in enumerate(alive)}
    paths = []
    for state, path in states.items():
        needs = []
        for source in node.all_input_nodes:
            value = result(source, state[index_of[source]].layout, source.meta.get("val"))
            if isinstance(value, Value) and (convert := conversion(value, Layout.STACKED)) is not None:
                needs.append((source, Layout.STACKED, price.move(value, convert)))
        paths.append(Path(path.cost + _converted(state, index_of, needs)[1], None, path))
    return paths

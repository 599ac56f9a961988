"""The vocabulary of batching rules.

A rule answers one question: given one node of a member's graph and the layouts of its operands, which call computes
the node for the whole array? It is a pure function ``rule(site, **arguments) -> Call | tuple[Call, ...] | None``; the
arguments are those of the ATen schema by name, defaults filled in. Tensors arrive as `Value`, sizes computed in the
graph as `Scalar`, scalars that differ between members as `MemberScalars`, everything else unchanged. ``None`` says:
not this combination, take the generic way (vmap of the one operator, else a loop over members).

A `Call` is a `Lowering`, the record of a plain function of tensors, and its arguments, each operand in the layout that
the function wants (``value.to(Layout.STACKED)``); the batch pass inserts the transitions. Several calls are candidates:
they compute the same up to rounding, and differ in speed or in layout. ``README.md`` here shows how to write a rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.core.layout import Layout, Listed
from hfusion.core.member_random import draws_random
from hfusion.core.tree import contains, leaves, map_leaves
from hfusion.ops.lowering import PLAIN, Efficiency, Lowering, Saves, View
from hfusion.ops.saved import saved_by, view_of


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the program: its node, its layout, and ``example``, the (fake) tensor that one member sees."""

    node: fx.Node
    layout: Layout
    example: Any

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = self.example.shape
        return shape

    @property
    def rank(self) -> int:
        return int(self.example.dim())

    @property
    def shared(self) -> bool:
        return self.layout is Layout.SHARED

    def to(self, layout: Layout, rank: int | None = None) -> Operand:
        """This value in ``layout``. ``rank`` adds singleton dims in front until a member sees that many dims."""
        return Operand(self, layout, rank)


@dataclass(frozen=True, eq=False)
class Operand:
    """A value in the layout, and with the number of dims, that a lowering wants."""

    value: Value
    layout: Layout
    rank: int | None = None


@dataclass(frozen=True, eq=False)
class Scalar:
    """A Python number computed in the graph (a size); the same for all members."""

    node: fx.Node
    example: Any


@dataclass(frozen=True)
class MemberScalars:
    """A scalar argument that differs between members; ``values[b]`` is member b's."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Site:
    """The node that a rule rewrites: its operator, the number of members, and one member's (fake) result."""

    target: OpOverload
    members: int
    example: Any

    @property
    def rank(self) -> int:
        return int(self.example.dim())

    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        layout: Layout,
        text: str = "",
        kwargs: Mapping[str, Any] | None = None,
        *,
        efficiency: Efficiency = PLAIN,
        saves: Saves | None = None,
        view: View | None = None,
        loops: bool = False,
    ) -> Call:
        """Return a call of ``fn``.

        ``text`` defaults to the layout, ``saves`` and ``view`` to what the operator itself keeps and returns.
        """
        saves = saved_by(self.target) if saves is None else saves
        view = view_of(self.target, self._casts(args)) if view is None else view
        return Call(Lowering(fn, layout, text or layout.value, efficiency, saves, view, loops), args, kwargs or {})

    def same_call(
        self, arguments: Mapping[str, Any], layout: Layout, text: str = "", efficiency: Efficiency = PLAIN
    ) -> Call:
        """Return a call of the operator itself with these arguments by name."""
        args, kwargs = in_order(self, arguments)
        return self.call(self.target, args, layout, text, kwargs, efficiency=efficiency)

    def _casts(self, args: tuple[Any, ...]) -> bool:
        """True if the result has another dtype than the first operand."""
        first = next(leaves(args, (Value, Operand)), None)
        value = first.value if isinstance(first, Operand) else first
        return value is not None and getattr(self.example, "dtype", None) != getattr(value.example, "dtype", None)


@dataclass(frozen=True)
class Call:
    """The result of a rule: ``lowering.fn(*args, **kwargs)`` computes the node's value in ``layout``."""

    lowering: Lowering
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fn(self) -> Callable[..., Any]:
        return self.lowering.fn

    @property
    def layout(self) -> Layout:
        return self.lowering.layout


Answer: TypeAlias = Call | tuple[Call, ...] | None
Rule: TypeAlias = Callable[..., Answer]
RuleTable: TypeAlias = Mapping[OpOverload, Rule]


def merge(*tables: RuleTable) -> RuleTable:
    """Merge tables of rules. Raises an error if an operator is in two of them."""
    merged: dict[OpOverload, Rule] = {}
    for table in tables:
        for target, rule in table.items():
            if target in merged:
                raise FusionError(f"{target} has two batching rules: {merged[target]} and {rule}; keep one")
            merged[target] = rule
    return merged


def values(arguments: Any) -> list[Value]:
    """Return all tensors in a nest of arguments, in order."""
    return list(leaves(arguments, Value))


def has_per_member(arguments: Any) -> bool:
    """True if a nest of arguments contains a scalar that differs between members."""
    return contains(arguments, MemberScalars)


def is_random(target: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """True if a call draws random numbers, so that members need separate draws even for shared operands."""
    if not draws_random(target):
        return False
    off = any(arguments.get(name) is False for name in ("train", "training"))
    rates = (arguments.get(name) for name in ("p", "dropout", "dropout_p"))
    return not off and not any(isinstance(rate, int | float) and rate == 0 for rate in rates)


def map_values(arguments: Any, fn: Callable[[Value], Any]) -> Any:
    """The same nest of arguments with ``fn`` applied to every tensor."""
    return map_leaves(arguments, Value, fn)


def hint(size: Any) -> int | None:
    """A size as a number: itself, the example of a symbolic one, or None where there is none."""
    if isinstance(size, int):
        return size
    value = size.node.hint if size.node.has_hint() else None
    return None if value is None else int(value)


def in_order(site: Site, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split arguments by name into positional and keyword ones, as the operator's schema has them."""
    positional, keywords = [], {}
    for parameter in site.target._schema.arguments:
        if parameter.name not in arguments:
            continue
        if parameter.kwarg_only:
            keywords[parameter.name] = arguments[parameter.name]
        else:
            positional.append(arguments[parameter.name])
    return tuple(positional), keywords


def call_per_member(fn: Callable[..., Any], members: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Listed:
    """Call ``fn`` once per member: a `Listed` argument gives member b its own entry."""
    return Listed(fn(*_row(args, b), **_row(kwargs, b)) for b in range(members))


class Memberwise:
    """A function of one member's tensors, called on listed values as ``f(members, args, kwargs)``."""

    def __init__(self, member: Callable[..., Any]) -> None:
        self.member = member
        functools.update_wrapper(self, member)

    def __call__(self, members: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Listed:
        return call_per_member(self.member, members, args, kwargs)


def _row(arguments: Any, member: int) -> Any:
    if isinstance(arguments, Listed):
        return arguments[member]
    if isinstance(arguments, dict):
        return {name: _row(item, member) for name, item in arguments.items()}
    if isinstance(arguments, list | tuple):
        return type(arguments)(_row(item, member) for item in arguments)
    return arguments


def loop(site: Site, arguments: Mapping[str, Any], efficiency: Efficiency = PLAIN) -> Call:
    """The node as one call of its operator per member; right for every operator and every argument."""
    args, kwargs = in_order(site, arguments)
    listed = map_values((args, kwargs), lambda v: v if v.shared else v.to(Layout.LISTED))
    whole = (site.target, site.members, *listed)
    return site.call(call_per_member, whole, Layout.LISTED, "loop over members", efficiency=efficiency, loops=True)


def always_loop(site: Site, **arguments: Any) -> Call:
    """Rule of operators that always run once per member."""
    return loop(site, arguments)


def scalars_alike(rule: Rule) -> Rule:
    """Decorate a rule for scalars that are the same in all members: a loop over members is taken where one differs."""

    @functools.wraps(rule)
    def checked(site: Site, **arguments: Any) -> Answer:
        return loop(site, arguments) if has_per_member(arguments) else rule(site, **arguments)

    return checked


def none_listed(rule: Rule) -> Rule:
    """Decorate a rule as `scalars_alike` does; a loop is taken where an operand is listed, too."""

    @functools.wraps(rule)
    def checked(site: Site, **arguments: Any) -> Answer:
        listed = any(value.layout is Layout.LISTED for value in values(arguments))
        return loop(site, arguments) if listed or has_per_member(arguments) else rule(site, **arguments)

    return checked


def pointwise(site: Site, **arguments: Any) -> Call | None:
    """Elementwise with broadcasting: the operator itself on operands brought to one layout.

    A listed operand makes the result listed; a packed one makes it packed where all operands can be packed without
    copying a full-size shared one; stacked otherwise.
    """
    operands = values(arguments)
    layouts = {v.layout for v in operands}
    if Layout.LISTED in layouts or has_per_member(arguments):
        return loop(site, arguments)
    packs = Layout.PACKED in layouts and all(_packable(v, site.example) for v in operands)
    layout = Layout.PACKED if packs else Layout.STACKED
    return site.same_call(map_values(arguments, lambda v: v if v.shared else v.to(layout, rank=site.rank)), layout)


def _packable(value: Value, result: Any) -> bool:
    """True if ``value`` broadcasts against a packed ``result`` as it is, or after a cheap transition."""
    missing = result.dim() - value.rank
    channels = value.shape[1 - missing] if missing <= 1 < value.rank + missing else 1
    if value.layout is Layout.PACKED:
        return missing == 0 and bool(channels == result.shape[1])
    if value.shared:
        return bool(channels == 1)
    return missing in (0, 1) and bool(channels == result.shape[1])


def table(targets: Iterable[OpOverload], rule: Rule) -> RuleTable:
    """The same rule for many operators."""
    return dict.fromkeys(targets, rule)


# The fold family: operators on ``[N, C, *S]`` that treat samples alike, so that members can be samples.


@dataclass(frozen=True)
class Fold:
    """A fold of members and samples into one dim: ``[B*N, ...]``, or ``[N*B, ...]`` if ``samples_first``."""

    members: int
    samples_first: bool

    @classmethod
    def of(cls, x: Tensor) -> Fold:
        """Return the fold in the memory order of ``x`` ``[B, N, ...]``, which needs no copy."""
        return cls(x.shape[0], x.stride(0) < x.stride(1))

    def fold(self, x: Tensor) -> Tensor:
        """``[B, N, ...] -> [B*N, ...]``; a view where the strides allow."""
        return (x.movedim(0, 1) if self.samples_first else x).flatten(0, 1)

    def unfold(self, x: Tensor) -> Tensor:
        """``[B*N, ...] -> [B, N, ...]``; a view."""
        if self.samples_first:
            return x.view(-1, self.members, *x.shape[1:]).movedim(1, 0)
        return x.view(self.members, -1, *x.shape[1:])


def folded(fn: Callable[..., Any], count: int, *args: Any, **kwargs: Any) -> Any:
    """Call ``fn`` with members as samples: the first ``count`` arguments and the results are ``[B, N, ...]``.

    Tensors in later arguments, such as weights, are the same for all members.
    """
    order = Fold.of(next(x for x in args if isinstance(x, Tensor)))
    operands = (order.fold(x) if isinstance(x, Tensor) else x for x in args[:count])
    result = fn(*operands, *args[count:], **kwargs)
    if isinstance(result, Tensor):
        return order.unfold(result)
    return tuple(order.unfold(x) for x in result)


def folding(
    rank: int | None = None,
    channelwise: bool = True,
    *,
    at_once: Efficiency = PLAIN,
    loops: Efficiency = PLAIN,
    packed: Efficiency | None = None,
) -> Rule:
    """Return the rule of an operator on samples of a batch.

    ``rank``: the rank of an operand that has N; in an operand of another rank the members take the place of N.
    ``None``: the operand always has N. ``channelwise``: each channel of the result depends on its own in the
    operands only, so that packed operands can stay packed. ``at_once``, ``packed`` and ``loops``: the efficiency of one
    call for all members, of one for packed operands where that is another, and of the loop over members.
    """

    def rule(site: Site, **arguments: Any) -> Call | None:
        operands = values(arguments)
        layouts = {v.layout for v in operands}
        if Layout.LISTED in layouts or has_per_member(arguments):
            return loop(site, arguments, loops)
        stacked = map_values(arguments, lambda v: v.to(Layout.STACKED))
        if rank is not None and operands[0].rank != rank:
            return site.same_call(stacked, Layout.STACKED, "members as batch", at_once)
        if channelwise and Layout.PACKED in layouts:
            operands_packed = map_values(arguments, lambda v: v.to(Layout.PACKED))
            return site.same_call(operands_packed, Layout.PACKED, efficiency=packed or at_once)
        args, _ = in_order(site, stacked)
        return site.call(folded, (site.target, len(args), *args), Layout.STACKED, "folded", efficiency=at_once)

    return rule

"""The calls that can compute a node of a member's graph for the whole array, given the layouts of its operands.

Pure functions, used for hypothetical layouts (`hfusion.passes.layouts`) and for those that were chosen
(`hfusion.passes.batch`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.core.layout import CONVERSIONS, Conversion, Layout, Listed, lift, lift_packed
from hfusion.core.tree import contains, leaves
from hfusion.ops.generic import generic
from hfusion.ops.lowering import Lowering, View
from hfusion.ops.rule import Call, Operand, RuleTable, Scalar, Site, Value, has_per_member, is_random, loop, values
from hfusion.ops.saved import NOTHING
from hfusion.passes.side_effects import RUNNING_STATISTICS
from hfusion.passes.views import DROPOUTS

Result: TypeAlias = Value | Scalar | None


class Unbatchable(FusionError):
    """No array can compute ``node``."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(why)
        self.node = node


def candidates(node: fx.Node, env: Mapping[fx.Node, Result], members: int, rules: RuleTable) -> tuple[Call, ...]:
    """Return the calls that compute ``node`` from its operands in ``env``. Raises Unbatchable if there is none."""
    try:
        return _candidates(node, env, members, rules)
    except FusionError as error:
        raise Unbatchable(node, str(error)) from error


def _candidates(node: fx.Node, env: Mapping[fx.Node, Result], members: int, rules: RuleTable) -> tuple[Call, ...]:
    args, kwargs = node.meta.get("arguments", (node.args, node.kwargs))
    args, kwargs = bind(args, env), bind(kwargs, env)
    target = node.target
    if target is operator.getitem:
        return (_getitem(args),)
    batched = any(not v.shared for v in values((args, kwargs))) or has_per_member((args, kwargs))
    if not isinstance(target, OpOverload):
        if batched or isinstance(target, str):
            raise FusionError(f"{target} at {node.format_node()} works on tensors but is no ATen operator")
        return (Call(Lowering(target, Layout.SHARED, "shared"), args, kwargs),)
    arguments = by_name(target, args, kwargs)
    site = Site(target, members, node.meta.get("val"))
    per_member = is_random(target, arguments)
    if not batched and not per_member and not _writes_shared(target, arguments):
        if target in DROPOUTS:
            return (site.call(target, args, Layout.SHARED, "off", kwargs, saves=NOTHING, view=View.ALWAYS),)
        return (site.call(target, args, Layout.SHARED, "shared", kwargs),)
    _check_strided(site)
    if _empty(site, arguments) or any(map(_is_sparse, values(arguments))):
        return (loop(site, arguments),)
    rule = rules.get(target)
    answer = rule(site, **arguments) if rule is not None else None
    if answer is None:
        return (generic(site, arguments),)
    return answer if isinstance(answer, tuple) else (answer,)


def _check_strided(site: Site) -> None:
    """Refuse a result per member that is sparse or nested, which no stack can hold."""
    unstackable = next((x for x in leaves(site.example, torch.Tensor) if x.layout is not torch.strided), None)
    if unstackable is not None:
        raise FusionError(
            f"{site.target} gives a tensor of layout {unstackable.layout}, which differs between members and cannot be "
            "stacked; work on dense tensors"
        )


def _is_sparse(value: Value) -> bool:
    """Return whether an operand, which all members share, has a layout that few of torch's batched operators take."""
    return isinstance(value.example, torch.Tensor) and value.example.layout is not torch.strided


def _empty(site: Site, arguments: Mapping[str, Any]) -> bool:
    """True if an operand of a pure call is empty: sizes cannot be inferred from it, and there is nothing to compute."""
    target = site.target
    writes = target._schema.is_mutable or target in RUNNING_STATISTICS
    if writes or target.namespace != "aten" or is_random(target, arguments) or not contains(site.example, torch.Tensor):
        return False
    return any(isinstance(size, int) and size == 0 for v in values(arguments) for size in v.shape)


def result(new: fx.Node, layout: Layout, example: Any) -> Result:
    """Return the value of a node that ``new`` computes in ``layout``: a `Scalar` for numbers, else a `Value`."""
    number = layout is Layout.SHARED and not contains(example, torch.Tensor)
    return Scalar(new, example) if number else Value(new, layout, example)


def operands(arguments: Any) -> Iterator[Operand]:
    """Return the operands of a call that have to be in a certain layout, in order; bare values are not converted."""
    return leaves(arguments, Operand)


def reached(operand: Operand) -> Layout:
    """Return the layout of the conversion; a packed operand of lower rank is a view of stacked channels."""
    lifted = operand.layout is Layout.PACKED and operand.rank is not None and operand.value.rank < operand.rank
    return Layout.STACKED if lifted else operand.layout


def route(operand: Operand, members: int) -> Iterator[tuple[Callable[..., Any], int | None, Layout]]:
    """Yield the steps from a value to the operand: a function, its second argument, and the resulting layout.

    ``members``: how many members take the value if all share it, and otherwise how many have it.
    """
    value, target_layout, rank = operand.value, operand.layout, operand.rank
    convert = conversion(value, reached(operand))
    if convert is not None:
        yield convert, members, reached(operand)
    if reached(operand) is not target_layout:
        yield lift_packed, rank, target_layout
    elif target_layout is Layout.STACKED and rank is not None and value.rank < rank:
        yield lift, rank, target_layout


def conversion(value: Value, layout: Layout) -> Conversion | None:
    """Return the function that converts ``value`` to ``layout``, None if it has that layout.

    Raises FusionError if there is no such conversion.
    """
    if value.layout is layout:
        return None
    convert = CONVERSIONS.get((value.layout, layout))
    if convert is None:
        raise FusionError(f"{value.node} is {value.layout.value} and cannot become {layout.value}")
    return convert


def _writes_shared(target: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """True if a call writes into a tensor; with shared operands alone it would write once, not once per member."""
    if target in RUNNING_STATISTICS:
        training = arguments.get("training", arguments.get("use_input_stats"))
        return bool(training) and arguments["running_mean"] is not None
    return target._schema.is_mutable


def _getitem(args: tuple[Any, ...]) -> Call:
    source, _ = args
    if isinstance(source, Value) and source.layout is Layout.LISTED:
        return Call(Lowering(pick, Layout.LISTED, "listed", saves=NOTHING, view=View.ALWAYS, loops=True), args)
    layout = source.layout if isinstance(source, Value) else Layout.SHARED
    return Call(Lowering(operator.getitem, layout, layout.value, saves=NOTHING, view=View.ALWAYS), args)


def pick(value: Listed, index: int) -> Listed:
    """Return each member's ``index``-th result of an operator with several results."""
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


def draws_numbers(node: fx.Node) -> bool:
    """Return whether a node of a member's graph draws random numbers: dropout of 0, or in eval mode, does not."""
    if not isinstance(node.target, OpOverload):
        return False
    return is_random(node.target, by_name(node.target, *node.meta.get("arguments", (node.args, node.kwargs))))


def bind(arguments: Any, env: Mapping[fx.Node, Result]) -> Any:
    """Return the nest of arguments with every node replaced by its value in ``env``."""
    if isinstance(arguments, fx.Node):
        return env[arguments]
    if isinstance(arguments, Mapping):
        return {name: bind(item, env) for name, item in arguments.items()}
    if isinstance(arguments, list | tuple):
        bound = [bind(item, env) for item in arguments]
        return bound if isinstance(arguments, list) else tuple(bound)
    return arguments

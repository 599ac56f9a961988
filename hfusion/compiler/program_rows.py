"""Derive the program of an array whose members have left, joined or been copied, without a new capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from hfusion.capture.fallback_runtime import OpaqueCall, calls, numbered
from hfusion.compiler.compiled_program import RULES, ArraySpec, Compiled, choose_ways, look_at
from hfusion.compiler.fill_scalars import check_constant, keyed_constants
from hfusion.core.layout import Layout
from hfusion.core.program import Kind
from hfusion.ops.rule import MemberScalars
from hfusion.passes.align import Changes, fill_rows
from hfusion.passes.batch import batch
from hfusion.passes.functional import OPAQUE
from hfusion.passes.layouts import Choice
from hfusion.passes.regions import regions

# The index of the call's number among the arguments of `OPAQUE`.
_CALL = 3


def of_rows(
    compiled: Compiled,
    rows: Sequence[int],
    subject: ArraySpec | None = None,
    changes: Mapping[int, Changes] | None = None,
) -> Compiled:
    """Return the program of ``subject``, whose member b equals member ``rows[b]`` of ``compiled`` except for tensors.

    Args:
        subject: None if no member runs code of its own.
        changes: the numbers in which a member of ``subject`` differs from that member of ``compiled``, by member.

    Raises:
        Unexplained: changes that cannot be located in the graph.
    """
    program, members = compiled.program, len(rows)
    graph, tensors = fill_rows(compiled.graph, rows, changes or {})
    if compiled.opaque and subject is None:
        raise ValueError("members that run their own code are needed as modules")
    opaque = _with_own_bodies(graph, subject) if compiled.opaque and subject is not None else ()
    slots = zip(program.slots, program.layouts, strict=True)
    stacked = {slot.name for slot, layout in slots if slot.name in compiled.constants and layout is Layout.STACKED}
    constants = {n: t[list(rows)] if n in stacked else t for n, t in compiled.constants.items()}
    for key, values in keyed_constants(compiled.graph, program.slots, tensors).items():
        if key not in stacked:
            constants[key] = constants[key].expand(members, *constants[key].shape)
            stacked.add(key)
        constants[key] = _with_values(key, constants[key], values)
    layouts = tuple(
        Layout.STACKED if slot.name in stacked and slot.kind is Kind.CONSTANT else layout
        for slot, layout in zip(program.slots, program.layouts, strict=True)
    )
    choices = _choices(compiled, graph) if (members, layouts) == (program.members, program.layouts) else None
    if choices is None:
        choices = choose_ways(graph, layouts, members)
    module = batch(graph, layouts, members, RULES, choices)
    new_program = replace(program, members=members, module=module, code=regions(module, members), layouts=layouts)
    look_at(new_program)
    return replace(compiled, program=new_program, graph=graph, constants=constants, opaque=opaque)


def _choices(compiled: Compiled, graph: fx.Graph) -> dict[fx.Node, Choice] | None:
    """Return the choices of a program for the nodes of ``graph``; None if members differ at other nodes there."""
    chosen = {n.meta["origin"]: n.meta["choice"] for n in compiled.program.module.graph.nodes if "choice" in n.meta}
    pairs = list(zip(compiled.graph.nodes, graph.nodes, strict=True))
    if any(_varies(old.meta.get("arguments")) != _varies(new.meta.get("arguments")) for old, new in pairs):
        return None
    return {new: chosen[old] for old, new in pairs if old in chosen}


def _varies(nest: Any) -> Any:
    """Return the nest of a call's arguments as bools: True for scalars that differ between members."""
    if isinstance(nest, dict):
        return tuple(map(_varies, nest.values()))
    if isinstance(nest, list | tuple):
        return tuple(map(_varies, nest))
    return isinstance(nest, MemberScalars)


def _with_values(key: str, stack: Tensor, values: Mapping[int, tuple[Tensor, Tensor]]) -> Tensor:
    """Return the stack of a constant with new values. ``values``: by member, the expected old and the new value."""
    result = stack.clone()
    for member, (old, new) in values.items():
        check_constant(key, stack[member], old)
        result[member] = new
    return result


def _with_own_bodies(graph: fx.Graph, subject: ArraySpec) -> tuple[OpaqueCall, ...]:
    """Let the eager fallbacks in ``graph`` call the members of ``subject``; return the new calls."""
    bodies = [subject.member(member) for member in range(subject.members)]
    new_calls: dict[int, OpaqueCall] = {}
    numbers: dict[int, int] = {}

    def new_call_number(number: int) -> int:
        if number not in numbers:
            call = calls[number]
            own_bodies = tuple(body.get_submodule(call.island.path) for body in bodies)
            new_calls[number] = replace(call, bodies=own_bodies)
            numbers[number] = numbered(new_calls[number])
        return numbers[number]

    def renumbered(number: int | MemberScalars) -> int | MemberScalars:
        return (
            MemberScalars(tuple(map(new_call_number, number.values)))
            if isinstance(number, MemberScalars)
            else new_call_number(number)
        )

    for node in graph.nodes:
        if node.target is not OPAQUE:
            continue
        for key in {"arguments", "members"} & node.meta.keys():
            args, named = node.meta[key]
            node.meta[key] = args, {**named, "call": renumbered(named["call"])}
        if "arguments" not in node.meta:
            node.update_arg(_CALL, new_call_number(node.args[_CALL]))
    return tuple(new_calls.values())

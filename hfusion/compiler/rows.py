"""The program of an array whose members have left, joined or been copied: made of the one before, without a capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from hfusion.capture.attribute_writes import names_used
from hfusion.capture.opaque import numbered
from hfusion.capture.own_code import OpaqueCall, calls
from hfusion.capture.references import references
from hfusion.compiler.compiled import RULES, ArraySpec, Compiled, choose_ways, look_at
from hfusion.core.layout import Layout
from hfusion.ops.rule import MemberScalars
from hfusion.passes.align import select_rows
from hfusion.passes.batch import batch
from hfusion.passes.islands import OPAQUE
from hfusion.passes.regions import regions

# The place of the call's number among the arguments of `OPAQUE`.
_CALL = 3


def of_rows(compiled: Compiled, rows: Sequence[int], subject: ArraySpec | None = None) -> Compiled:
    """The program of ``subject``, whose member b is what member ``rows[b]`` of ``compiled`` is but for its tensors.

    None where no member runs code of its own.
    """
    program, members = compiled.program, len(rows)
    graph = select_rows(compiled.graph, rows)
    if compiled.opaque and subject is None:
        raise ValueError("members that run their own code are needed as modules")
    opaque = _with_own_bodies(graph, subject) if compiled.opaque and subject is not None else ()
    tune = subject is not None and subject.tune
    module = batch(graph, program.layouts, members, RULES, choose_ways(graph, program.layouts, members, tune))
    slots = zip(program.slots, program.layouts, strict=True)
    stacked = {slot.name for slot, layout in slots if slot.name in compiled.constants and layout is Layout.STACKED}
    constants = {n: t[list(rows)] if n in stacked else t for n, t in compiled.constants.items()}
    made = replace(program, members=members, module=module, code=regions(module, members))
    look_at(made)
    return replace(compiled, program=made, graph=graph, constants=constants, opaque=opaque)


def _with_own_bodies(graph: fx.Graph, subject: ArraySpec) -> tuple[OpaqueCall, ...]:
    """Let the calls of members' own code in ``graph`` be those of the members of ``subject``; the new calls."""
    bodies = [subject.member(member) for member in range(subject.members)]
    used = names_used(bodies[0])
    made: dict[int, OpaqueCall] = {}
    numbers: dict[int, int] = {}

    def own(number: int) -> int:
        if number not in numbers:
            call = calls[number]
            own_bodies = tuple(body.get_submodule(call.place) for body in bodies)
            held = tuple(references(body, used) for body in own_bodies)
            made[number] = replace(call, bodies=own_bodies, references=held)
            numbers[number] = numbered(made[number])
        return numbers[number]

    def renumbered(number: int | MemberScalars) -> int | MemberScalars:
        return MemberScalars(tuple(map(own, number.values))) if isinstance(number, MemberScalars) else own(number)

    for node in graph.nodes:
        if node.target is not OPAQUE:
            continue
        for key in {"arguments", "members"} & node.meta.keys():
            args, named = node.meta[key]
            node.meta[key] = args, {**named, "call": renumbered(named["call"])}
        if "arguments" not in node.meta:
            node.update_arg(_CALL, own(node.args[_CALL]))
    return tuple(made.values())

"""One program for a function of tensors whose shapes differ between members, made of a program for each shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import RULES, Compiled, choose_ways, look_at
from hfusion.core.errors import FusionError
from hfusion.core.guards import AllHold, InputGuards
from hfusion.core.layout import Layout
from hfusion.core.program import Kind, Slot
from hfusion.core.ragged import Ragged
from hfusion.passes.batch import batch
from hfusion.passes.merge import VariantGraph, merge
from hfusion.passes.regions import regions


def join_sizes(arguments: Arguments, blocks: Sequence[tuple[Sequence[int], Compiled]]) -> Compiled:
    """Return one program of all members for ``arguments``, some of which are ragged.

    In place of each ragged argument, it takes one tensor ``[k, ...]`` per shape, for the k members with that shape.

    Args:
        blocks: members whose ragged arguments have the same shapes, with the program for them.

    Raises:
        FusionError: the program of a block cannot run for some members only.
    """
    members = sum(len(rows) for rows, _ in blocks)
    # Of each leaf, the members whose rows an input holds; None for all.
    parts = [leaf.rows_by_shape if isinstance(leaf, Ragged) else [None] for leaf in arguments.leaves]
    starts = [sum(map(len, parts[:index])) for index in range(len(parts))]
    inputs = [Slot(Kind.INPUT, str(position)) for position in range(sum(map(len, parts)))]
    variants, constants, guards = [], dict[str, Tensor](), list[InputGuards]()
    layouts: dict[Slot, Layout] = {}
    for number, (rows, compiled) in enumerate(blocks):
        if compiled.checks or compiled.memory_orders is not None:
            raise FusionError("it checks values, or depends on the strides of its arguments")
        positions = [
            start + next(k for k, input_members in enumerate(part) if input_members is None or rows[0] in input_members)
            for start, part in zip(starts, parts, strict=True)
        ]
        moved = [_moved(slot, number, positions) for slot in compiled.program.slots]
        for slot, new, layout in zip(compiled.program.slots, moved, compiled.program.layouts, strict=True):
            layouts[new] = layout
            if slot.kind is Kind.CONSTANT:
                constants[new.name] = compiled.constants[slot.name]
                if layout is Layout.STACKED:
                    raise FusionError("members have tensors of their own in it")
        variants.append(VariantGraph(tuple(rows), compiled.graph, tuple(moved)))
        assert isinstance(compiled.guards, AllHold)
        guards += [InputGuards(part, tuple(positions), len(inputs)) for part in compiled.guards.parts]
    rows_of_inputs = dict(zip(inputs, (input_members for part in parts for input_members in part), strict=True))
    held = {
        slot: input_members
        for slot, input_members in rows_of_inputs.items()
        if input_members is not None and len(input_members) < members
    }
    merged = merge(variants, {}, held)
    first = blocks[0][1]
    slots, own_layouts = merged.slots, tuple(layouts[slot] for slot in merged.slots)
    module = batch(
        merged.graph, own_layouts, members, RULES, choose_ways(merged.graph, own_layouts, members, tune=False)
    )
    code = regions(module, members)
    program = replace(first.program, members=members, module=module, code=code, slots=slots, layouts=own_layouts)
    look_at(program)
    return Compiled(program, merged.graph, constants, (), AllHold(tuple(guards)), partial=merged.partial)


def _moved(slot: Slot, number: int, positions: Sequence[int]) -> Slot:
    """Return the slot of the joined program for a ``slot`` of the program of block ``number``."""
    if slot.kind is Kind.INPUT:
        return Slot(Kind.INPUT, str(positions[int(slot.name)]))
    return replace(slot, name=f"{slot.name}_of_{number}") if slot.kind is Kind.CONSTANT else slot

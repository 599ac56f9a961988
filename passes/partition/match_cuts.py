"""Cut a second program of the same modules where the first was cut, so that each shard finds its tensors there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from hfusion.core.errors import PlanError
from hfusion.core.program import Kind, Program, Slot
from hfusion.passes.cost.cost import operators
from hfusion.passes.partition.split_program import slots, weight_views


def match_cuts(program: Program, names: Mapping[str, str], held: Sequence[frozenset[str]]) -> list[int]:
    """Return the end of each shard's run of operators, see `split`, with every operator as early as its tensors allow.

    A run may be empty.

    Args:
        names: from the keys of tensors to one key per tensor.
        held: the keys that each shard has loaded; tensors that no shard has may be used anywhere.

    Raises:
        PlanError: the tensors are used in an order other than that of the shards.
    """
    of, views, nodes = slots(program), weight_views(program), operators(program)
    loaded = frozenset[str]().union(*held)
    ends, shard = [], 0
    for index, node in enumerate(nodes):
        keys = {names[key] for key in _keys(node, of, views) if key in names} & loaded if node not in views else set()
        while not keys <= held[shard]:
            ends.append(index)
            shard += 1
            if shard == len(held):
                raise PlanError(
                    f"program {program.name}: operator {node.name} uses {', '.join(sorted(keys))} after tensors of "
                    "later shards, so it cannot be cut like the program that is trained; give a device the memory to "
                    "hold the task whole, or leave the eval loader out"
                )
    return ends + [len(nodes)] * (len(held) - len(ends))


def _keys(node: fx.Node, of: Mapping[fx.Node, Slot], views: set[fx.Node]) -> set[str]:
    """The tensors that an operator uses, itself or by views of them."""
    keys: set[str] = set()
    for source in node.all_input_nodes:
        slot = of.get(source)
        if slot is not None and slot.kind is not Kind.INPUT:
            keys.add(slot.name)
        elif source in views:
            keys |= _keys(source, of, views)
    return keys

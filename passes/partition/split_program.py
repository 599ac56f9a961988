"""Write the shards of a program as programs of their own: Program and shards -> parts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

from hfusion.core.errors import PlanError
from hfusion.core.program import Kind, Part, Program, Slot
from hfusion.core.python_values import IdentityRef
from hfusion.core.tree import leaves
from hfusion.passes.cost.cost import operators, viewed
from hfusion.passes.functional import OPAQUE
from hfusion.passes.regions import regions
from hfusion.passes.side_effects import RUNNING_STATISTICS, has_effect, written_inputs
from hfusion.torch_private.dispatch_modes import enter_autocast, exit_autocast

_WRITTEN = (Kind.BUFFER, Kind.PARAMETER)
# The place of what members' own code changes among the arguments of its call.
_CHANGING = 3
_BORDERS = (enter_autocast, exit_autocast)


def input_names(program: Program) -> tuple[str, ...]:
    """The names under which parts take the program's inputs, in the order of the inputs."""
    names = {int(slot.name): node.name for node, slot in slots(program).items() if slot.kind is Kind.INPUT}
    return tuple(names[position] for position in sorted(names))


def split(program: Program, ends: Sequence[int]) -> tuple[Part, ...]:
    """Split ``program`` into parts. A part ends before the operator numbered in ``ends``, where the next one begins.

    A program that is split again in the same way gives the same parts.
    Run one after the other, the parts compute the program, bit for bit.
    Views of weights are taken again in every part that uses them: a weight never crosses a cut.

    Raises:
        PlanError: a cut inside an autocast region, or ends of another program.
    """
    return _split(IdentityRef(program), tuple(ends))


@lru_cache(maxsize=64)
def _split(held: IdentityRef, ends: tuple[int, ...]) -> tuple[Part, ...]:
    program: Program = held.held
    nodes = operators(program)
    if ends[-1] != len(nodes):
        raise PlanError(
            f"program {program.name} has {len(nodes)} operators, but the shards given are of one with "
            f"{ends[-1]} operators; make a new plan"
        )
    if len(ends) > 1 and any(node.target in _BORDERS for node in nodes):
        raise PlanError(
            f"program {program.name}: forward switches autocast on or off inside, where it cannot be cut; "
            "give a device the memory to hold it whole, or use torch.autocast outside of the model"
        )
    cutting = _Cutting(program, nodes)
    written = next((key for node in nodes for key in cutting.written(node, Kind.PARAMETER)), None)
    if len(ends) > 1 and written is not None:
        raise PlanError(
            f"program {program.name}: forward writes into the parameter {written}, which shards of it cannot follow; "
            "give a device the memory to hold it whole"
        )
    places = enumerate(pairwise([0, *ends]), start=1)
    return tuple(cutting.part(*run, ends=number == len(ends)) for number, run in places)


def slots(program: Program) -> dict[fx.Node, Slot]:
    """Return the slot of each placeholder."""
    placeholders = [node for node in program.module.graph.nodes if node.op == "placeholder"]
    return dict(zip(placeholders, program.slots, strict=True))


def weight_views(program: Program) -> set[fx.Node]:
    """The operators that give views of parameters, buffers or constants."""
    weights = {node for node, slot in slots(program).items() if slot.kind is not Kind.INPUT}
    views: set[fx.Node] = set()
    # Symbols stand for any size above 1: only a weight that was expanded has some.
    for node in operators(program):
        if all(source in views or source in weights for source in node.all_input_nodes) and viewed(node, 2) is not None:
            views.add(node)
    return views


class _Cutting:
    """The facts about one program that all its parts use."""

    def __init__(self, program: Program, nodes: Sequence[fx.Node]) -> None:
        self.members = program.members
        self.nodes = nodes
        self.slots = slots(program)
        self.output = next(node for node in program.module.graph.nodes if node.op == "output")
        self.position = {node: index for index, node in enumerate((*nodes, self.output))}
        self.views = weight_views(program)

    def _is_weight(self, node: fx.Node) -> bool:
        return node in self.slots and self.slots[node].kind is not Kind.INPUT

    def part(self, first: int, last: int, *, ends: bool) -> Part:
        """Operators ``[first, last)``; ``ends``: and the outputs of the program."""
        outputs = [self.output] if ends else []
        inside = [node for node in self.nodes[first:last] if node not in self.views]
        nodes = self._with_views([*inside, *outputs])
        outside = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in nodes)
        keys = [node for node in outside if self._is_weight(node)]
        takes = [node for node in outside if not self._is_weight(node)]
        gives = [node for node in inside if not ends and any(self.position[user] >= last for user in node.users)]
        graph, env = fx.Graph(), {}
        for node in (*keys, *takes):
            env[node] = graph.placeholder(node.name)
            env[node].meta.update(node.meta)
        for node in nodes:
            if node is not self.output:
                env[node] = graph.node_copy(node, env.__getitem__)
        if ends:
            graph.node_copy(self.output, env.__getitem__)
        else:
            graph.output(tuple(env[node] for node in gives))
        graph.lint()
        code = regions(fx.GraphModule(torch.nn.Module(), graph), self.members)
        return Part(
            cache(lambda device: retarget_device(code, device).forward),
            tuple(self.slots[node] for node in keys),
            tuple(node.name for node in takes),
            tuple(node.name for node in gives),
            frozenset(key for node in inside for kind in _WRITTEN for key in self.written(node, kind)),
        )

    def _with_views(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
        """``nodes`` with the views of weights that they use, each before its users."""
        ordered: dict[fx.Node, None] = {}

        def add(node: fx.Node) -> None:
            for source in node.all_input_nodes:
                if source in self.views and source not in ordered:
                    add(source)
            ordered[node] = None

        for node in nodes:
            add(node)
        return ordered

    def written(self, node: fx.Node, kind: Kind) -> list[str]:
        """The buffers that a call may write to, or the parameters that it does."""
        origin = node.meta.get("origin")
        if origin is None or node.meta.get("transition"):
            return []
        unknown = isinstance(origin.target, OpOverload) and origin.target.namespace == "hfusion"
        unchanged = origin.target in RUNNING_STATISTICS and not written_inputs(origin)
        if unchanged or not (unknown or has_effect(origin)):
            return []
        sources = node.all_input_nodes if kind is Kind.BUFFER else _targets(node, origin)
        roots = [self._root(source) for source in sources]
        slots = [self.slots[root] for root in roots if root in self.slots]
        return [slot.name for slot in slots if slot.kind is kind]

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self.views:
            node = node.all_input_nodes[0]
        return node


def _targets(node: fx.Node, origin: fx.Node) -> Sequence[fx.Node]:
    """Return the nodes that a call of the array writes to: the target of a copy, or those its own code changes."""
    if origin.target is torch.ops.aten.copy_.default:
        return node.args[:1]  # type: ignore[return-value]
    return node.args[_CHANGING] if origin.target is OPAQUE else ()  # type: ignore[return-value]


# Let a graph that was captured on one device run on another: the devices that its calls name are replaced.


def retarget_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """``module`` with every device in the arguments of a call replaced by ``device``; itself if none differs."""
    nodes = [node for sub in _graphs(module) for node in sub.graph.nodes]
    if all(node_device == device for node in nodes for node_device in leaves((node.args, node.kwargs), torch.device)):
        return module

    def swapped(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    moved = copy.deepcopy(module)
    for sub in _graphs(moved):
        for node in sub.graph.nodes:
            node.args, node.kwargs = (map_aggregate(value, swapped) for value in (node.args, node.kwargs))
        sub.recompile()
    return moved


def _graphs(module: fx.GraphModule) -> list[fx.GraphModule]:
    """The module itself and the bodies of its loops."""
    return [sub for sub in module.modules() if isinstance(sub, fx.GraphModule)]


# Cut a second program of the same modules where the first was cut, so that each shard finds its tensors there.


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

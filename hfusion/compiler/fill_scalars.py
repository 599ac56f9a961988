"""Derive the captures of members that differ in numbers from one capture, and verify it by a few others.

Every member runs once eagerly, which records its numbers at every operator. The capture's record of operators gives
their places in the graph. One or two further captures must equal the graphs derived for their members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, fx

from hfusion.capture.capture_member import Member
from hfusion.capture.eager_runs import twin
from hfusion.capture.export import is_faithful
from hfusion.capture.fallback_runtime import OpaqueCall
from hfusion.capture.operator_trace import OperatorTrace, differing_places, trace_operators
from hfusion.capture.python_differences import numbers_meet_sizes
from hfusion.core.errors import FusionError
from hfusion.core.guards import Guards
from hfusion.core.memory import same_values
from hfusion.core.program import Capture, Kind, Slot
from hfusion.passes.align import Changes, Unexplained, align, fill, scalars

# Largest number of captures of members that differ in numbers only: the first, and those that verify the places.
MAX_CAPTURES = 3
# Largest number of structures of traces; members with further structures are captured one by one.
MAX_STRUCTURES = 8

T = TypeVar("T")

aten = torch.ops.aten
# Operators that an export adds where a buffer is assigned; they take no numbers.
_ADDED = frozenset({aten.detach.default, aten.copy_.default})
# Operators that an export replaces by others.
_SAME = {aten.lift_fresh_copy.default: aten.lift_fresh.default}


# A function that captures a variant: it returns the capture, and the calls of eager fallbacks in it.
CaptureVariant: TypeAlias = Callable[[int], tuple[Capture, list[OpaqueCall]]]


def capture_variants(
    count: int, member: Callable[[int], Member], capture: CaptureVariant
) -> list[tuple[Capture, list[OpaqueCall]]]:
    """Return the captures of variants 0 to ``count - 1``, exporting at most `MAX_CAPTURES` that differ in numbers only.

    Args:
        member: returns the member of a variant.
        capture: captures a variant.

    Raises:
        FusionError: a member cannot be captured; the message gives the reason.
    """
    if count <= MAX_CAPTURES:
        return [capture(variant) for variant in range(count)]
    captures: dict[int, tuple[Capture, list[OpaqueCall]]] = {}
    for group, traces in _groups(count, member):
        captures |= _capture_group(group, traces, member, capture)
    return [captures[variant] if variant in captures else capture(variant) for variant in range(count)]


def _groups(count: int, member: Callable[[int], Member]) -> list[tuple[list[int], list[OperatorTrace]]]:
    """Return groups of more than `MAX_CAPTURES` variants whose traces have one structure, with the traces."""
    groups: list[tuple[list[int], list[OperatorTrace]]] = []
    for variant in range(count):
        traced = member(variant)
        trace = trace_operators(twin(traced.model), traced.args, traced.kwargs)
        if trace is None:
            if variant == 0:
                # The other variants would probably fail, too.
                return []
            continue
        for variants, traces in groups:
            if traces[0].same_structure(trace):
                variants.append(variant)
                traces.append(trace)
                break
        else:
            if len(groups) < MAX_STRUCTURES:
                groups.append(([variant], [trace]))
    return [group for group in groups if len(group[0]) > MAX_CAPTURES]


def _capture_group(
    group: Sequence[int], traces: Sequence[OperatorTrace], member: Callable[[int], Member], capture: CaptureVariant
) -> dict[int, tuple[Capture, list[OpaqueCall]]]:
    """Return the captures of variants whose traces have one structure; of some only if filling in numbers fails."""
    first, calls = capture(group[0])
    captures = {group[0]: (first, calls)}
    if calls:
        return captures
    others = [variant for variant in group if variant != group[0]]
    models = [member(variant).model for variant in others] if first.size_uses else []
    if numbers_meet_sizes(first.size_uses, member(group[0]).model, models):
        return captures
    try:
        changes = {
            variant: changes_between(first.calls, traces[0], numbers)
            for variant, numbers in zip(group, traces, strict=True)
            if variant != group[0]
        }
        filled = {variant: filled_capture(first, numbers) for variant, numbers in changes.items()}
    except Unexplained:
        return captures
    for variant in _provers(changes):
        if may_be_sizes(first.calls, changes[variant]):
            captures[variant] = capture(variant)
            if captures[variant][1] or not _same_capture(captures[variant][0], filled[variant]):
                return captures
        else:
            proving = member(variant)
            if not is_faithful(filled[variant], proving.model, proving.args, proving.kwargs):
                return captures
    return {variant: (capture, []) for variant, capture in filled.items()} | captures


def may_be_sizes(calls: Sequence[Any], changes: Changes) -> bool:
    """Return whether a changed number may determine sizes, so that the guards on sizes need a capture."""
    kinds = (
        str(argument.type)
        for call, paths in changes.items()
        for path in paths
        for argument in calls[call]._schema.arguments
        if argument.name == path[0]
    )
    return any("int" in kind.lower() or "List" in kind for kind in kinds)


def changes_between(calls: Sequence[Any], trace: OperatorTrace, other: OperatorTrace) -> Changes:
    """Return the numbers that differ between two traces of one structure, by index into the ``calls`` of a capture.

    Raises:
        Unexplained: the capture has operators that the first trace lacks.
    """
    call_index: dict[int, int] = {}
    start = 0
    for number, target in enumerate(calls):
        # An export leaves out only unused results.
        index = next((k for k in range(start, len(trace.calls)) if _same_target(trace.calls[k].target, target)), None)
        if index is not None:
            call_index[index], start = number, index + 1
        elif target not in _ADDED:
            raise Unexplained(f"the capture calls {target}, which the code does not")
    paths_by_index = differing_places(trace, other)
    return {call_index[index]: paths for index, paths in paths_by_index.items() if index in call_index}


def _same_target(target: Any, other: Any) -> bool:
    return _SAME.get(target, target) is _SAME.get(other, other)


def filled_capture(first: Capture, changes: Changes) -> Capture:
    """Return the capture of a member whose numbers differ from ``first`` by ``changes``. Raises Unexplained."""
    graph, tensors = fill(first.graph, changes)
    constants = dict(first.constants)
    for key, (old, new) in keyed_constants(first.graph, first.slots, tensors).items():
        check_constant(key, constants[key], old)
        constants[key] = new
    return replace(first, graph=graph, constants=constants)


def keyed_constants(graph: fx.Graph, slots: Sequence[Slot], named: Mapping[str, T]) -> dict[str, T]:
    """Return ``named``, keyed by constants instead of placeholders. Raises Unexplained if one is no constant."""
    if not named:
        return {}
    pairs = zip(graph.find_nodes(op="placeholder"), slots, strict=True)
    keys = {node.name: slot.name for node, slot in pairs if slot.kind is Kind.CONSTANT}
    unknown = named.keys() - keys.keys()
    if unknown:
        raise Unexplained(f"{min(unknown)} is no constant")
    return {keys[name]: item for name, item in named.items()}


def check_constant(key: str, constant: Tensor, created: Tensor) -> None:
    """Raise Unexplained if a constant differs from the tensor that the code created."""
    if not same_values(constant, created):
        raise Unexplained(f"the tensor {key} is not as the code gave it")


def _provers(changes: Mapping[int, Changes]) -> list[int]:
    """Choose the variants to capture besides the first: each has the most differing numbers not covered before."""
    differing = {
        v: {(call, path) for call, paths in variant_changes.items() for path in paths}
        for v, variant_changes in changes.items()
    }
    chosen: list[int] = []
    proven: set[Any] = set()
    while len(chosen) < MAX_CAPTURES - 1:
        best = max(differing, key=lambda variant: len(differing[variant] - proven))
        if chosen and not differing[best] - proven:
            break
        chosen.append(best)
        proven |= differing.pop(best)
    return chosen


def _same_capture(capture: Capture, other: Capture) -> bool:
    try:
        graph = align([capture.graph, other.graph], (0, 1))
        guards = [
            guard.assumptions() if isinstance(guard, Guards) else guard for guard in (capture.guards, other.guards)
        ]
    except (FusionError, ValueError):
        return False
    return (
        not scalars(graph)
        and (capture.out_spec, capture.modes, capture.slots) == (other.out_spec, other.modes, other.slots)
        and guards[0] == guards[1]
        and capture.constants.keys() == other.constants.keys()
        and all(same_values(tensor, other.constants[name]) for name, tensor in capture.constants.items())
    )

"""Members of a population that come together in an array, or part, as their forwards turn out to differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from hfusion.capture.attribute_fingerprint import fingerprint
from hfusion.capture.python_differences import differing_attributes
from hfusion.core.errors import ForwardsDiffer, FusionError
from hfusion.population.grouping import TWINS, UNIQUE, shared_frozen, shortened
from hfusion.population.member_layout import PlacedGroup
from hfusion.population.moving import MemberState, copy_member_state, put

if TYPE_CHECKING:
    from hfusion.population.mixed import MixedMembers


# Maximum number of members of a group that are compared with those of another.
_COMPARED = 8


def settle(mixed: MixedMembers, new: Sequence[PlacedGroup]) -> None:
    """Move plain members that have just been added, with their state, into groups of members like them."""
    joining: dict[int, tuple[PlacedGroup, list[PlacedGroup]]] = {}
    # Groups in this set join another one, so no group joins them.
    moving = {group.number for group in new}
    for group in new:
        target = _target(mixed, group, moving)
        if target is None:
            moving.remove(group.number)
            group.why = group.why or UNIQUE
            continue
        joining.setdefault(target.number, (target, []))[1].append(group)
    for target, groups in joining.values():
        _unite(mixed, target, groups)


def _target(mixed: MixedMembers, group: PlacedGroup, moving: set[int]) -> PlacedGroup | None:
    """Return the group that a plain member may join, preferably one with a member that reads the same state."""
    model = group.model
    candidates = [
        other
        for other in mixed.groups
        if other.number not in moving
        and frozenset((other.number, group.number)) not in mixed.apart
        and other.may_take(model, group.signature)
    ]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    model_fingerprint = fingerprint(model)
    return next((other for other in candidates if model_fingerprint in _fingerprints(other)), candidates[0])


def _fingerprints(group: PlacedGroup) -> list[object]:
    fused, rows = group.members.fused, range(len(group.members))
    return [fingerprint(fused._member(row)) for row in rows if group.rows[row] is not None]


def _unite(mixed: MixedMembers, target: PlacedGroup, groups: Sequence[PlacedGroup]) -> None:
    """Make one array of a group and plain members. If that fails, they stay separate, with the reason in ``why``."""
    rows = [group.live[0] for group in groups]
    states = [copy_member_state(group.members, 0) for group in groups]
    try:
        if target.is_plain:
            index = mixed.groups.index(target)
            members = mixed.options.group_of([copy_member_state(target.members, 0), *states], ())
            united = mixed.add(members, [target.live[0], *rows], TWINS, index)
            _inherit(mixed, target, united)
            target.rows = [None]
        else:
            _receive(target, states, rows)
    except FusionError as error:
        for group in groups:
            group.why = shortened(str(error))
        return
    for group in groups:
        group.rows = [None]
    mixed.changed()


def _receive(target: PlacedGroup, states: Sequence[MemberState], rows: Sequence[int]) -> None:
    """Add members to an array, in free or new rows. Raises FusionError, and then adds none."""
    array = target.members
    missing = len(states) - len(array._roll.free)
    if missing > 0:
        array.grow(missing)
        target.rows = [*target.rows, *[None] * (len(array) - len(target.rows))]
    free_rows = array._roll.free[: len(states)]
    array._drop_gradients()
    array.fused.put(free_rows, [state.model for state in states])
    for free_row, row, state in zip(free_rows, rows, states, strict=True):
        put(array, free_row, state)
        target.rows[free_row] = row


def part(
    mixed: MixedMembers, group: PlacedGroup, error: ForwardsDiffer, chosen: Sequence[int] | None = None
) -> list[PlacedGroup]:
    """Split a group into one group for each set of members that do the same in forward, and return these.

    ``chosen``: the rows of the group that were called; None: all. Members that the error does not name were not called,
    or have batches of another size; they stay with a member that reads the same state. Raises the error itself if it
    does not tell the members apart.
    """
    group.members._check_between()
    live = [local for local, row in enumerate(group.rows) if row is not None]
    if chosen is None:
        parts = [rows for of_graph in error.groups if (rows := [local for local in of_graph if local in live])]
    else:
        graph_rows = [
            [chosen[model_index] for model_index in of_graph if model_index < len(chosen)] for of_graph in error.groups
        ]
        parts = [rows for rows in graph_rows if rows]
    named = {local for rows in parts for local in rows}
    parts = _with_others(group, parts, [local for local in live if local not in named])
    if not named or sorted(local for rows in parts for local in rows) != live:
        raise error
    index, old_rows = mixed.groups.index(group), list(group.rows)
    reasons = _reasons(group, parts, error, chosen)
    states = [[copy_member_state(group.members, local) for local in rows] for rows in parts]
    shared = shared_frozen([state.model for of_part in states for state in of_part])
    new_groups: list[PlacedGroup] = []
    for number, (rows, of_part, why) in enumerate(zip(parts, states, reasons, strict=True)):
        members = mixed.options.group_of(of_part, shared)
        new = mixed.add(members, [old_rows[local] for local in rows], why, index + number)
        _inherit(mixed, group, new)
        new_groups.append(new)
    mixed.apart |= {frozenset((first.number, second.number)) for first, second in combinations(new_groups, 2)}
    group.rows = [None] * len(group.rows)
    mixed.changed()
    # Not now: another group that they may join may have made this step already.
    mixed.unsettled += [new for new in new_groups if new.is_plain]
    return new_groups


def _with_others(group: PlacedGroup, parts: Sequence[list[int]], others: Sequence[int]) -> list[list[int]]:
    """Return the parts with ``others`` added: each to a part with a member that reads the same, or to a new part."""
    by_content: dict[object, list[int]] = {}
    for rows in parts:
        for local in rows:
            by_content[fingerprint(group.members.fused._member(local))] = rows
    divided = list(parts)
    for local in others:
        content = fingerprint(group.members.fused._member(local))
        if content not in by_content:
            by_content[content] = []
            divided.append(by_content[content])
        by_content[content].append(local)
    return divided


def _reasons(
    group: PlacedGroup, parts: Sequence[Sequence[int]], error: ForwardsDiffer, chosen: Sequence[int] | None
) -> list[str]:
    """Return why each part is a group: the attributes in which its members differ from those of another part."""
    if len(parts) == 1:
        # A member that differs has left: its row is free.
        return [group.why]
    models = [[group.members.fused._member(local) for local in rows[:_COMPARED]] for rows in parts]
    reasons = []
    for number, rows in enumerate(parts):
        other = int(number == 0)
        names = f"row {group.rows[rows[0]]}", f"row {group.rows[parts[other][0]]}"
        difference = differing_attributes(models[number], models[other], names)
        why = difference or _message(error, group, chosen)
        reasons.append(shortened(f"its members do something else in forward: {why}"))
    return reasons


def _message(error: ForwardsDiffer, group: PlacedGroup, chosen: Sequence[int] | None) -> str:
    """Return the error's message with rows of the population in place of model indices."""

    def row(match: re.Match[str]) -> str:
        index = int(match[1])
        # An array of some members is filled up with copies of the first.
        local = index if chosen is None else chosen[index if index < len(chosen) else 0]
        return f"row {group.rows[local]}"

    return re.sub(r"\bmodel (\d+)", row, str(error).split(". Fuse ")[0])


def _inherit(mixed: MixedMembers, old: PlacedGroup, new: PlacedGroup) -> None:
    """Keep group ``new`` apart from all groups that ``old`` was kept apart from."""
    others = [next(iter(pair - {old.number})) for pair in mixed.apart if old.number in pair]
    mixed.apart |= {frozenset((other, new.number)) for other in others}

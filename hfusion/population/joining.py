"""Members that start in a population, or become copies of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hfusion.core.errors import FusionError
from hfusion.core.row_indices import is_row, rows_of
from hfusion.optim.hyper import HyperValue
from hfusion.optim.lr_scheduler import Make, one_for_each
from hfusion.population.group_options import value_of
from hfusion.population.grouping import grouped, settle, shared_frozen
from hfusion.population.members import Event, EventKind, check_start, listed
from hfusion.population.moving import MemberState, copy_member_state
from hfusion.population.plain_member import PlainMember
from hfusion.population.plain_module import PlainModule
from hfusion.population.training_group import TrainingGroup

if TYPE_CHECKING:
    from hfusion.population.population import Population

Values = tuple[
    Make | Sequence[Make] | None,
    HyperValue | None,
    HyperValue | None,
    int | Sequence[int] | None,
    Mapping[str, Any],
]
"""Values of members that start: scheduler, clip_norm, clip_value, accumulate, and hyper-parameters."""


def start(
    population: Population,
    row: int | Sequence[int] | None,
    model: nn.Module | Sequence[nn.Module],
    tag: str | Sequence[str] | None,
    values: Values,
) -> Any:
    """Add models as members and return their rows; see `Population.start`."""
    models = listed("model", model, nn.Module)
    tags = [None] * len(models) if tag is None else listed("tag", tag, str)
    for group in population._groups:
        group.check_between()
    number, options = population._names.number, population._options
    try:
        rows = _start_in_array(population, row, models, tags, values) if population._whole else None
        if rows is None:
            population._names.number = number
            population._divide()
            rows = _start_apart(population, row, models, tags, values)
    except BaseException:
        population._names.number = number
        if options is not population._options:
            population._options, population._whole = options, True
        raise
    return rows[0] if row is None or is_row(row) else rows


def _start_in_array(
    population: Population, row: Any, models: Sequence[nn.Module], tags: Sequence[str | None], values: Values
) -> list[int] | None:
    """Put models into rows of the only array, and return these; None if they cannot be fused with its members."""
    (group,), before = population._groups, population._size
    if row is None and not group._roll.free:
        population._grow(1)
    try:
        rows = group._roll.free[:1] if row is None else rows_of(row, population._size)
        check_start(rows, tags, population.tags, len(models))
        names = population._names.given(tags, population.tags)
        group.restart(rows, *values, models=models)
    except BaseException as error:
        if population._size > before:
            group.resize(list(range(before)), before)
            population._size = before
            population._changed()
        if isinstance(error, FusionError):
            return None
        raise
    for member_row, name in zip(rows, names, strict=True):
        group.rows[member_row] = member_row
        group._roll.enter(member_row, name)
    population._changed()
    return rows


def _start_apart(
    population: Population, row: Any, models: Sequence[nn.Module], tags: Sequence[str | None], values: Values
) -> list[int]:
    """Add models as plain members, which then join groups of members like them, and return their rows."""
    taken = population.tags
    rows = (population._layout.free or [population._size])[:1] if row is None else rows_of(row, population._size)
    check_start(rows, tags, taken, len(models))
    names = population._names.given(tags, taken)
    grouped(models)
    scheduler, clip_norm, clip_value, accumulate, hypers = values
    makes = [None] * len(models) if scheduler is None else one_for_each(scheduler, len(models))
    shared = shared_frozen(models, [group.model for group in population._groups])
    pairs_of = {h.key for group in population._groups for h in group.optimizer.hypers if h.index is not None}
    options, count, new = population._made_with, len(models), []
    for index, model in enumerate(models):
        norm, value, calls = (
            value_of(name, given, index, count)
            for name, given in (("clip", clip_norm), ("clip", clip_value), ("accumulate", accumulate))
        )
        own = {key: value_of(key, given, index, count, pair=key in pairs_of) for key, given in hypers.items()}
        member = PlainMember(PlainModule(model, shared), options, [0])
        member.restart([0], options.schedule_of_new(makes[index]), norm, value, calls, own)
        new.append(member)
    population._size = max(population._size, *(each + 1 for each in rows))
    for new_row, name, member in zip(rows, names, new, strict=True):
        population._add(member, [new_row], "", names=[name])
        population._lineage.append(Event(population.steps, name, EventKind.START))
    settle(population, new)
    population._changed()
    return rows


def copy_members(population: Population, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy members by pairs of rows; see `Population.copy`."""
    moves = [(source, target) for source, target in pairs if source != target]
    for group in population._groups:
        group.check_between()
    layout = population._layout
    for source, _ in moves:
        group, local = layout.slot_of(source)
        if bool(group._roll.frozen[local]):
            tag = group._roll.tag(local)
            raise ValueError(f"{tag!r} in row {source} went bad and is frozen: copy a healthy member")
    tags = layout.tags
    free = [target for _, target in moves if tags[target] is None]
    names = dict(zip(free, population._names.given([None] * len(free), tags), strict=True))
    within: dict[int, tuple[TrainingGroup, list[tuple[int, int]]]] = {}
    across: list[tuple[int, str, MemberState]] = []
    for source, target in moves:
        group, local = layout.slot_of(source)
        # Rows of one array are those of the population, also free ones.
        slot = layout.slots[target] or ((group, target) if population._whole else None)
        if slot is not None and slot[0] is group:
            within.setdefault(group.number, (group, []))[1].append((local, slot[1]))
        else:
            across.append((target, tags[target] or names[target], copy_member_state(group, local)))
    for group, locals_ in within.values():
        group.copy(locals_, {row: (row, name) for row, name in names.items()})
    _replace(population, across)
    population._changed()


def _replace(population: Population, copies: Sequence[tuple[int, str, MemberState]]) -> None:
    """Fill rows with copies of members of other groups, under the given names."""
    for row, _, _ in copies:
        if (slot := population._layout.slots[row]) is not None:
            slot[0].release(slot[1])
    population._changed()
    new = []
    for row, name, state in copies:
        shared = shared_frozen([state.model], [group.model for group in population._groups])
        group = population._group_of([state], shared)
        group._roll.rename(0, name)
        population._add(group, [row], "")
        population._lineage.append(Event(population.steps, name, EventKind.COPY, state.tag))
        new.append(group)
    settle(population, new)

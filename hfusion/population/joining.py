"""Members that start in a population, or become copies of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hfusion.core.row_indices import is_row, rows_of
from hfusion.optim.hyper import HyperValue
from hfusion.optim.lr_scheduler import Make, one_for_each
from hfusion.population.group_options import value_of
from hfusion.population.grouping import MemberState, copy_member_state, grouped, settle, shared_frozen
from hfusion.population.members import EventKind, check_start, listed
from hfusion.population.plain_group import plain_group
from hfusion.population.training_group import TrainingGroup

if TYPE_CHECKING:
    from hfusion.population.population import Population


def start(
    population: Population,
    row: int | Sequence[int] | None,
    model: nn.Module | Sequence[nn.Module],
    tag: str | Sequence[str] | None,
    scheduler: Make | Sequence[Make] | None,
    clip_norm: HyperValue | None,
    clip_value: HyperValue | None,
    accumulate: int | Sequence[int] | None,
    hypers: Mapping[str, Any],
) -> Any:
    """Add models as plain members, which then join groups of members like them; see `Population.start`."""
    models = listed("model", model, nn.Module)
    tags = [None] * len(models) if tag is None else listed("tag", tag, str)
    taken, count = population.tags, len(models)
    rows = (population._layout.free or [len(population)])[:1] if row is None else rows_of(row, len(population))
    check_start(rows, tags, taken, count)
    grouped(models)
    makes = [None] * count if scheduler is None else one_for_each(scheduler, count)
    shared = shared_frozen(models, [group.model for group in population._groups])
    pairs_of = {h.key for group in population._groups for h in group.optimizer.hypers if h.index is not None}
    options, history, new = population._options, population._history, list[TrainingGroup]()
    number, events = population._names.number, len(history.events)
    try:
        names = population._names.given(tags, taken)
        for index, joining in enumerate(models):
            norm, value, calls = (
                value_of(name, given, index, count)
                for name, given in (("clip", clip_norm), ("clip", clip_value), ("accumulate", accumulate))
            )
            own = {key: value_of(key, given, index, count, pair=key in pairs_of) for key, given in hypers.items()}
            member = plain_group(joining, options, 0, shared, history)
            member.begin_anew(options.schedule_of_new(makes[index]), norm, value, calls, own)
            new.append(member)
        for new_row, name, member in zip(rows, names, new, strict=True):
            population._add(member, [new_row], "", names=[name])
            member.table.note(0, EventKind.START)
        settle(population, new)
        if sum(bool(group.live) for group in population._groups) > 1:
            population.check_hooks()
    except BaseException:
        population._names.number = number
        del history.events[events:]
        for group in population._groups:
            group.release(local for local, of_local in enumerate(group.rows) if of_local in rows)
        population._changed()
        raise
    population._size = max(population._size, *(each + 1 for each in rows))
    population._changed()
    return rows[0] if row is None or is_row(row) else rows


def copy_members(population: Population, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy members by pairs of rows; see `Population.copy`."""
    moves = [(source, target) for source, target in pairs if source != target]
    layout = population._layout
    for source, _ in moves:
        group, local = layout.slot_of(source)
        if bool(group.table["frozen"][local]):
            tag = group.table.tag(local)
            raise ValueError(f"{tag!r} in row {source} went bad and is frozen: copy a healthy member")
    tags = layout.tags
    free = [target for _, target in moves if tags[target] is None]
    names = dict(zip(free, population._names.given([None] * len(free), tags), strict=True))
    copies: dict[TrainingGroup, list[tuple[int, int]]] = {}
    alone: list[tuple[int, MemberState]] = []
    for source, target in moves:
        group, local = layout.slot_of(source)
        if group.is_plain:
            alone.append((target, copy_member_state(group, local)))
        else:
            copies.setdefault(group, []).append((local, target))
    written: list[tuple[TrainingGroup, int, int, str | None]] = []
    for group, of_group in copies.items():
        places, sources = group.places([target for _, target in of_group]), list(range(len(group)))
        origins = [group.table.tag(local) for local, _ in of_group]
        for place, (local, _) in zip(places, of_group, strict=True):
            sources[place] = local
        group.arrange(sources)
        written += [(group, p, row, o) for p, (_, row), o in zip(places, of_group, origins, strict=True)]
    # All were read: members that are written over, and were in other groups, leave these.
    for _, target in moves:
        if (slot := layout.slots[target]) is not None and not any(slot == held[:2] for held in written):
            slot[0].release([slot[1]])
    new = []
    for target, state in alone:
        shared = shared_frozen([state.model], [group.model for group in population._groups])
        group = population._group_of([state], shared)
        population._add(group, [target], "")
        written.append((group, 0, target, state.tag))
        new.append(group)
    for group, place, target, origin in written:
        group.table.enter(place, tags[target] or names[target], target)
        group.table.note(place, EventKind.COPY, origin)
    population._changed()
    settle(population, new)
    population._changed()

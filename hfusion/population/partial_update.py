"""Early updates of accumulated gradients, and new gradient limits, between two steps of a population."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hfusion.optim.hyper import HyperValue
from hfusion.population.any_models import Population
from hfusion.population.group_options import value_of
from hfusion.population.group_updates import GroupUpdates
from hfusion.population.member_layout import PlacedGroup
from hfusion.population.population import ArrayGroup


def flush(population: Population) -> bool:
    """Update members that have made fewer than ``accumulate`` calls of `step`. Return whether there were any.

    Their gradients stay divided by ``accumulate``, as in the last group of an epoch of `hfusion.Task`.
    """
    members = population._members
    if isinstance(members, ArrayGroup):
        return _flush_array(members)
    with members._lock, members.updates() as updates:
        flushed = [_flush_group(group, updates) for group in members.groups]
        return any(flushed)


def _flush_group(group: PlacedGroup, updates: GroupUpdates) -> bool:
    with updates.of_group(group.members, group.rows):
        return _flush_array(group.members)


def _flush_array(array: ArrayGroup) -> bool:
    with array._lock:
        updates = array._updates
        if not updates.underway:
            return False
        due = updates.done > 0
        if not array._common:
            updates.sums.take(array.fused, due)
        # Losses that are not finite were noted at each call.
        array._update(torch.zeros(len(array), device="cpu"), due)
        return True


def limit_norms(population: Population, rows: Sequence[int], norms: HyperValue) -> None:
    """Set the largest gradient norms of members, from the next update on. Raises ValueError for one below 0."""
    members = population._members
    if isinstance(members, ArrayGroup):
        _limit_array(members, rows, norms)
        return
    for index, row in enumerate(rows):
        group, local = members.layout.slot_of(row)
        _limit_array(group.members, [local], value_of("norms", norms, index, len(rows)))


def _limit_array(array: ArrayGroup, rows: Sequence[int], norms: HyperValue) -> None:
    with array._lock:
        limits = array._limits
        values = None if limits.value is None else limits.value.values[list(rows)]
        array._limits = limits.with_rows(rows, norms, values)

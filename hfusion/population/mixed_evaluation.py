"""Metrics of the members of several groups, from one reading of the data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.core.calls import StackedInput, call_arguments, is_stacked, take_entries
from hfusion.core.errors import ForwardsDiffer
from hfusion.core.layout import Listed, member_values
from hfusion.core.ragged import Ragged
from hfusion.population.evaluate import pair_of
from hfusion.population.member_groups import joined_rows
from hfusion.population.member_layout import PlacedGroup, check_entries
from hfusion.population.member_metrics import check_metric, joined_batches, member_metrics
from hfusion.population.regroup import part

if TYPE_CHECKING:
    from hfusion.population.mixed import MixedMembers

Outputs = list[tuple[Any, Any]]
"""Of each batch the outputs of a group, with a leading dim of its rows, and the targets."""


@torch.no_grad()
def evaluate_mixed(mixed: MixedMembers, metric: Callable[..., Any], loader: Iterable[Any]) -> dict[int, float]:
    """Return the ``metric`` of each member by its row of the population; every batch is read once."""
    check_metric(metric)
    outputs = _group_outputs(mixed, loader)
    values: dict[int, float] = {}
    for group in mixed.groups:
        names = {local: group.members._roll.tag(local) for local, row in enumerate(group.rows) if row is not None}
        rows = {local: row for local, row in enumerate(group.rows) if row is not None}
        numbers = member_metrics(outputs[group.number], metric, names, rows)
        values |= {rows[local]: number for local, number in numbers.items()}
    return values


@torch.no_grad()
def mixed_outputs(mixed: MixedMembers, loader: Iterable[Any]) -> tuple[Any, Any]:
    """Return the members' outputs in eval mode for all batches, ``[rows, N, ...]``, and the targets.

    A free row has the outputs of some member. Raises ValueError where members have outputs of different shapes.
    """
    outputs = _group_outputs(mixed, loader)
    joined = [joined_batches(outputs[group.number]) for group in mixed.groups]
    rows = [group.rows for group in mixed.groups]
    in_order = [row for of_group in rows for row in of_group] == list(range(len(mixed)))
    order = None if in_order else mixed.layout.order.clamp(max=sum(map(len, rows)) - 1)
    return joined_rows([output for output, _ in joined], rows, order), joined[0][1]


def _group_outputs(mixed: MixedMembers, loader: Iterable[Any]) -> dict[int, Outputs]:
    """Return the outputs in eval mode and targets of each batch, by number of the group; reads every batch once."""
    outputs: dict[int, Outputs] = {group.number: [] for group in mixed.groups}
    modes: dict[int, ExitStack] = {}
    try:
        for batch in loader:
            inputs, target = pair_of(batch)
            check_entries((inputs, target), len(mixed))
            queue = deque(mixed.groups)
            while queue:
                group = queue.popleft()
                if group.number not in modes:
                    modes[group.number] = ExitStack()
                    modes[group.number].enter_context(group.members.fused.evaluating())
                args, kwargs = call_arguments(take_entries(inputs, group.entries()), {})
                try:
                    output = group.members.fused(*args, **kwargs)
                except ForwardsDiffer as error:
                    # The group leaves eval mode, since splitting it copies members with their modes.
                    modes.pop(group.number).close()
                    queue.extendleft(reversed(_parted(mixed, group, error, outputs)))
                    continue
                outputs[group.number].append((output, take_entries(target, group.entries())))
    finally:
        for stack in modes.values():
            stack.close()
    return outputs


def _parted(
    mixed: MixedMembers, group: PlacedGroup, error: ForwardsDiffer, outputs: dict[int, Outputs]
) -> list[PlacedGroup]:
    """Split a group, divide its earlier outputs among the new groups, and return these."""
    rows, before = list(group.rows), outputs.pop(group.number)
    parts = part(mixed, group, error)
    for new in parts:
        outputs[new.number] = [_rows_of(batch, [rows.index(row) for row in new.rows]) for batch in before]
    return parts


def _rows_of(batch: tuple[Any, Any], rows: list[int]) -> tuple[Any, Any]:
    """Return ``rows`` of the outputs, and of stacked tensors of the target."""
    outputs, target = batch
    chosen = pytree.tree_map(lambda leaf: _leaf_rows(leaf, rows), outputs)
    return chosen, pytree.tree_map(
        lambda leaf: _leaf_rows(leaf, rows) if isinstance(leaf, StackedInput | Ragged) else leaf,
        target,
        is_leaf=is_stacked,
    )


def _leaf_rows(leaf: Any, rows: list[int]) -> Any:
    if isinstance(leaf, Ragged):
        return Ragged([leaf[row] for row in rows])
    if isinstance(leaf, StackedInput):
        return StackedInput(leaf.tensor[rows])
    if isinstance(leaf, Listed):
        return member_values([leaf[row] for row in rows])
    return leaf[rows] if isinstance(leaf, Tensor) else leaf

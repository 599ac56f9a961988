"""Outputs and metrics of a population's members, from one reading of the data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.array.module import FusedModule
from hfusion.core.calls import StackedInput, call_arguments, entry_counts, is_stacked, take_entries
from hfusion.core.errors import ForwardsDiffer
from hfusion.core.layout import Listed, member_values, values_of
from hfusion.core.ragged import Ragged
from hfusion.population.grouping import part
from hfusion.population.member_metrics import check_metric, joined_batches, member_metrics

if TYPE_CHECKING:
    from hfusion.population.population import Population
    from hfusion.population.training_group import TrainingGroup

Outputs = list[tuple[Any, Any]]
"""Of each batch the outputs of a group, with a leading dim of its rows, and the targets."""


@torch.no_grad()
def evaluate(population: Population, metric: Callable[..., Any], loader: Iterable[Any]) -> dict[int, float]:
    """Return the ``metric`` of each member by its row of the population; every batch is read once."""
    check_metric(metric)
    outputs = _group_outputs(population, loader)
    values: dict[int, float] = {}
    for group in population._groups:
        rows = {local: row for local, row in enumerate(group.rows) if row is not None}
        names = {local: group.table.tag(local) for local in rows}
        numbers = member_metrics(outputs[group.number], metric, names, rows)
        values |= {rows[local]: number for local, number in numbers.items()}
    return values


@torch.no_grad()
def member_outputs(population: Population, loader: Iterable[Any]) -> tuple[Any, Any]:
    """Return the members' outputs in eval mode for all batches, ``[rows, N, ...]``, and the targets.

    A free row has the outputs of some member. Raises ValueError where members have outputs of different shapes.
    """
    outputs = _group_outputs(population, loader)
    joined = [joined_batches(outputs[group.number]) for group in population._groups]
    rows = [group.rows for group in population._groups]
    in_order = not population._parted or [row for of_group in rows for row in of_group] == list(range(len(population)))
    order = None if in_order else population._layout.order.clamp(max=sum(map(len, rows)) - 1)
    return joined_rows([output for output, _ in joined], rows, order), joined[0][1]


@torch.no_grad()
def array_outputs(fused: FusedModule, loader: Iterable[Any]) -> tuple[Any, Any]:
    """Return the members' outputs in eval mode for all batches of ``loader``, ``[B, N, ...]``, and the targets.

    Raises ValueError for a loader without batches, and for batches that cannot be joined.
    """
    batches = []
    with fused.evaluating():
        for batch in loader:
            inputs, target = _pair_of(batch)
            args, kwargs = call_arguments(inputs, {})
            batches.append((fused(*args, **kwargs), target))
    return joined_batches(batches)


def _pair_of(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the target of a batch. Raises ValueError if it is not a pair."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        many = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise ValueError(
            f"evaluate expects batches (inputs, target), got {type(batch).__name__}{many} from the loader. Several "
            "inputs are a tuple, ((x, mask), target)."
        )
    return batch[0], batch[1]


def check_entries(values: Any, rows: int) -> None:
    """Raise a ValueError unless each stacked tensor in nested ``values`` has ``rows`` entries."""
    for entries in entry_counts(values):
        if entries != rows:
            raise ValueError(
                f"a stacked argument has {entries} entries for a population of {rows} rows: give one for each row"
            )


def check_stacked(arguments: Any, rows: Sequence[int]) -> None:
    """Raise a ValueError unless every stacked tensor has an entry for each of ``rows``."""
    for count in entry_counts(arguments):
        if count != len(rows):
            raise ValueError(
                f"a stacked argument holds {count} entries, and rows={list(rows)} names {len(rows)} "
                "members: give one entry for each of them, in that order"
            )


def _group_outputs(population: Population, loader: Iterable[Any]) -> dict[int, Outputs]:
    """Return the outputs in eval mode and targets of each batch, by number of the group; reads every batch once."""
    outputs: dict[int, Outputs] = {group.number: [] for group in population._groups}
    modes: dict[int, ExitStack] = {}
    try:
        for batch in loader:
            inputs, target = _pair_of(batch)
            check_entries((inputs, target), len(population))
            queue = deque(population._groups)
            while queue:
                group = queue.popleft()
                if group.number not in modes:
                    modes[group.number] = ExitStack()
                    modes[group.number].enter_context(group.evaluating())
                args, kwargs = call_arguments(take_entries(inputs, group.entries()), {})
                try:
                    output = group.outputs(args, kwargs)
                except ForwardsDiffer as error:
                    # The group leaves eval mode, since splitting it copies members with their modes.
                    modes.pop(group.number).close()
                    queue.extendleft(reversed(_parted(population, group, error, outputs)))
                    continue
                outputs[group.number].append((output, take_entries(target, group.entries())))
    finally:
        for stack in modes.values():
            stack.close()
    return outputs


def _parted(
    population: Population, group: TrainingGroup, error: ForwardsDiffer, outputs: dict[int, Outputs]
) -> list[TrainingGroup]:
    """Split a group, divide its earlier outputs among the new groups, and return these."""
    rows, before = list(group.rows), outputs.pop(group.number)
    parts = part(population, group, error)
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


def joined_rows(outputs: Sequence[Any], rows: Sequence[Sequence[int | None]], order: Tensor | None) -> Any:
    """Join the outputs of groups, each a nest with a leading dim of members, to one of all members.

    Args:
        outputs: the outputs of each group.
        rows: for each group, the rows of its members, for errors.
        order: index of each member into the concatenated groups; None if they are in order.

    Raises:
        ValueError: outputs of groups differ in structure, shape or dtype.
    """
    flat = [pytree.tree_flatten_with_path(output) for output in outputs]
    spec = flat[0][1]
    for (_, other), of_group in zip(flat, rows, strict=True):
        if other != spec:
            raise _unlike("outputs", pytree.treespec_pprint(spec), pytree.treespec_pprint(other), rows[0], of_group)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [_joined([leaf for _, leaf in column], pytree.keystr(column[0][0]), rows, order) for column in columns]
    return pytree.tree_unflatten(joined, spec)


def _joined(leaves: Sequence[Any], path: str, rows: Sequence[Sequence[int | None]], order: Tensor | None) -> Any:
    kind = _kind(leaves[0])
    for leaf, of_group in zip(leaves, rows, strict=True):
        if _kind(leaf) != kind:
            raise _unlike(f"output{path}", _shown(leaves[0]), _shown(leaf), rows[0], of_group)
    if not isinstance(leaves[0], Tensor):
        pairs = zip(leaves, rows, strict=True)
        each = [value for leaf, of_group in pairs for value in values_of(leaf, len(of_group))]
        return member_values(each if order is None else [each[index] for index in order.tolist()])
    values = torch.cat(list(leaves)) if len(leaves) > 1 else leaves[0]
    return values if order is None else values[order.to(values.device)]


def _kind(leaf: Any) -> Any:
    """Return the properties that members' outputs must share."""
    return (leaf.dtype, tuple(leaf.shape[1:])) if isinstance(leaf, Tensor) else None


def _shown(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape[1:])}" if isinstance(leaf, Tensor) else type(leaf).__name__


def _unlike(
    source: str, first: Any, other: Any, rows: Sequence[int | None], other_rows: Sequence[int | None]
) -> ValueError:
    live, other_live = ([row for row in member_rows if row is not None] for member_rows in (rows, other_rows))
    return ValueError(
        f"{source}: {first} of the members in rows {live}, {other} of those in rows {other_live}. Members are averaged "
        "where they give outputs of one shape and dtype: choose such rows by weights=, or let the models give them"
    )

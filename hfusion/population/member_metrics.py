"""A metric of each member from the outputs of an evaluation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.compiler.arguments import row_of_leaf
from hfusion.core.calls import StackedInput, is_stacked
from hfusion.core.layout import Listed, member_values, same_value, values_of
from hfusion.core.ragged import Ragged


@torch.no_grad()
def member_metrics(
    batches: Sequence[tuple[Any, Any]],
    metric: Callable[..., Any],
    members: Mapping[int, str],
    rows: Mapping[int, int] | None = None,
) -> dict[int, float]:
    """Return the ``metric`` of each of ``members``, by row, from outputs ``[rows, ...]`` and targets of all batches.

    ``rows``: the row that errors name for each; by default the row of the outputs.
    """
    check_batches(batches)
    updated = is_updated(metric)
    apart = not updated and _any_ragged(batches)
    parts = batches if updated or apart else [joined_batches(batches)]
    values = {}
    for row, tag in members.items():
        member_batches = [_of_member(part, row) for part in parts]
        if apart:
            member_batches = [
                (
                    _joined([output for output, _ in member_batches], 0),
                    _joined([target for _, target in member_batches], 0),
                )
            ]
        try:
            values[row] = number(_updated(metric, member_batches) if updated else metric(*member_batches[0]))
        except Exception as error:
            error.add_note(f"This is of the metric of member {tag!r} in row {(rows or {}).get(row, row)}.")
            raise
    return values


def is_updated(metric: object) -> bool:
    """Return whether a metric is updated batch by batch, as those of torchmetrics."""
    return all(hasattr(metric, name) for name in ("reset", "update", "compute"))


def check_metric(metric: object) -> None:
    """Raise a ValueError if ``metric`` is not a metric, such as a loader in its place."""
    if not callable(metric) and not is_updated(metric):
        raise ValueError(
            f"the metric must be a function of a member's outputs and targets, got {type(metric).__name__}. Give "
            "evaluate the metric first, then the loader."
        )


def joined_batches(batches: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the concatenated outputs ``[rows, N, ...]`` and targets of all batches.

    What has no samples gets one entry per batch: tensors ``[rows]`` become ``[rows, batches]``, other values lists
    unless they are the same in all batches. Raises ValueError.
    """
    check_batches(batches)
    return _joined([output for output, _ in batches], 1), _joined([target for _, target in batches], 0)


def check_batches(batches: Sequence[Any]) -> None:
    """Raise a ValueError if there are no batches."""
    if not batches:
        raise ValueError("the loader gave no batch, so that there is nothing to evaluate")


def _updated(metric: Any, batches: Sequence[tuple[Any, Any]]) -> Any:
    """Compute a metric that keeps a state, such as those of torchmetrics, on a copy, so that members share none."""
    member_metric = copy.deepcopy(metric)
    member_metric.reset()
    for output, target in batches:
        member_metric.update(output, target)
    return member_metric.compute()


def _of_member(batch: tuple[Any, Any], row: int) -> tuple[Any, Any]:
    outputs, target = batch
    kinds = Tensor | Ragged | Listed
    member_outputs = pytree.tree_map(lambda leaf: leaf[row] if isinstance(leaf, kinds) else leaf, outputs)
    return member_outputs, pytree.tree_map(lambda leaf: row_of_leaf(leaf, row), target, is_leaf=is_stacked)


def _any_ragged(batches: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether members have different numbers of samples, so that their batches are joined separately."""
    return any(isinstance(leaf, Ragged) for leaf in pytree.tree_leaves(batches))


def _joined(parts: Sequence[Any], dim: int) -> Any:
    """Return the batches concatenated along ``dim``, or along dim 1 for stacked values."""
    flat = [pytree.tree_flatten(part, is_leaf=is_stacked) for part in parts]
    for _, spec in flat:
        if spec != flat[0][1]:
            raise ValueError(f"batches of different structures, {flat[0][1]} and {spec}, cannot be joined")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_cat(column, dim) for column in columns], flat[0][1])


def _cat(leaves: Sequence[Any], dim: int) -> Any:
    first = leaves[0]
    if len(leaves) == 1:
        return first
    if is_stacked(first):
        return StackedInput(torch.cat([leaf.tensor for leaf in leaves], 1))
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return torch.cat(list(leaves), dim) if first.dim() > dim else torch.stack(list(leaves), dim)
    members = max((len(leaf) for leaf in leaves if isinstance(leaf, Listed)), default=1)
    by_member = list(zip(*(values_of(leaf, members) for leaf in leaves), strict=True))
    return member_values([v[0] if all(same_value(x, v[0]) for x in v) else list(v) for v in by_member])


def number(value: Any, source: str = "the metric", subject: str = "one member") -> float:
    """Return a metric as ``float(value)`` does, never rounded to a narrower type. Raises ValueError."""
    if isinstance(value, list | tuple) and len(value) == 1:
        return number(value[0], source, subject)
    if isinstance(value, Tensor | np.ndarray | np.generic):
        array = value.detach() if isinstance(value, Tensor) else np.asarray(value)
        kind = "tensor" if isinstance(value, Tensor) else type(value).__name__
        is_real = not value.is_complex() if isinstance(value, Tensor) else value.dtype.kind in "biuf"
        if not is_real or math.prod(array.shape) != 1:
            shown = f"{kind} of {array.dtype} of shape {list(array.shape)}"
            raise ValueError(f"{source} must give a number for {subject}, got {shown}")
        value = array.item()
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is no number")
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        shown = f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__
        raise ValueError(f"{source} must give a number for {subject}, got {shown}") from error

"""Metrics of the members of an array over a set of batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.array.module import FusedModule
from hfusion.core.calls import StackedInput, is_stacked
from hfusion.step.train_step import call_arguments


@torch.no_grad()
def evaluate(fused: FusedModule, metric: Callable[..., Any], loader: Iterable[Any], rows: Sequence[int]) -> list[float]:
    """``metric`` of each of ``rows`` over all batches ``(inputs, target)`` of ``loader``, in eval mode."""
    batches = []
    with fused.evaluating():
        for inputs, target in loader:
            args, kwargs = call_arguments(inputs, {})
            batches.append((fused(*args, **kwargs), target))
    if not batches:
        raise ValueError("the loader gave no batch, so that there is nothing to evaluate")
    if all(hasattr(metric, name) for name in ("reset", "update", "compute")):
        return [_updated(metric, [_of_member(batch, row) for batch in batches]) for row in rows]
    outputs, targets = (_joined([batch[k] for batch in batches], dim) for k, dim in ((0, 1), (1, 0)))
    return [_number(metric(*_of_member((outputs, targets), row))) for row in rows]


def _updated(metric: Any, batches: Sequence[tuple[Any, Any]]) -> float:
    """A metric that keeps a state, such as those of torchmetrics: a copy of its own for each member."""
    own = copy.deepcopy(metric)
    own.reset()
    for output, target in batches:
        own.update(output, target)
    return _number(own.compute())


def _of_member(batch: tuple[Any, Any], row: int) -> tuple[Any, Any]:
    outputs, target = batch
    own = pytree.tree_map(lambda leaf: leaf[row] if isinstance(leaf, Tensor) else leaf, outputs)
    return own, pytree.tree_map(lambda leaf: leaf.tensor[row] if is_stacked(leaf) else leaf, target, is_leaf=is_stacked)


def _joined(parts: Sequence[Any], dim: int) -> Any:
    """The batches as one, along ``dim``; along the next one where members have their own."""
    flat = [pytree.tree_flatten(part, is_leaf=is_stacked) for part in parts]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_cat(column, dim) for column in columns], flat[0][1])


def _cat(leaves: Sequence[Any], dim: int) -> Any:
    first = leaves[0]
    if is_stacked(first):
        return StackedInput(torch.cat([leaf.tensor for leaf in leaves], 1))
    if isinstance(first, Tensor) and first.dim() > dim:
        return torch.cat(list(leaves), dim)
    if len(leaves) == 1:
        return first
    raise ValueError(
        f"batches of {type(first).__name__} cannot be joined along their samples, as evaluate does so that any metric "
        "is exact; give it a metric with update and compute"
    )


def _number(value: Any) -> float:
    found = torch.as_tensor(value)
    if found.numel() != 1:
        raise ValueError(f"the metric gave a tensor of shape {list(found.shape)} for one member: it must give a number")
    return float(found)

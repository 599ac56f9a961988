"""Metrics of the members of an array over a set of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hfusion.array.module import FusedModule
from hfusion.core.calls import call_arguments
from hfusion.population.member_metrics import check_metric, joined_batches, member_metrics


@torch.no_grad()
def evaluate(
    fused: FusedModule, metric: Callable[..., Any], loader: Iterable[Any], members: Mapping[int, str]
) -> dict[int, float]:
    """Return the ``metric`` of each of ``members``, by row, over all batches of ``loader``, in eval mode."""
    check_metric(metric)
    return member_metrics(_batches(fused, loader), metric, members)


@torch.no_grad()
def outputs(fused: FusedModule, loader: Iterable[Any]) -> tuple[Any, Any]:
    """Return the members' outputs in eval mode for all batches of ``loader``, ``[B, N, ...]``, and the targets.

    Raises ValueError for a loader without batches, and for batches that cannot be joined.
    """
    return joined_batches(_batches(fused, loader))


def _batches(fused: FusedModule, loader: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return the members' outputs and the target of each batch."""
    batches = []
    with fused.evaluating():
        for batch in loader:
            inputs, target = pair_of(batch)
            args, kwargs = call_arguments(inputs, {})
            batches.append((fused(*args, **kwargs), target))
    return batches


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the target of a batch. Raises ValueError if it is not a pair."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        many = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise ValueError(
            f"evaluate expects batches (inputs, target), got {type(batch).__name__}{many} from the loader. Several "
            "inputs are a tuple, ((x, mask), target)."
        )
    return batch[0], batch[1]

"""Updates of a population at the end of an epoch, and other limits of its members' gradients, between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hfusion.optim.hyper import HyperValue

if TYPE_CHECKING:
    from hfusion.population.population import Population


def flush(population: Population) -> bool:
    """Make the update of calls of `step` that are fewer than ``accumulate``; whether there were any.

    Their gradients stay divided by ``accumulate``, as in the last group of an epoch of `hfusion.Task`.
    """
    with population._lock:
        updates = population._updates
        if not updates.underway:
            return False
        due = updates.done > 0
        if not population._common:
            updates.sums.take(population.fused, due)
        # Losses that are not finite were noted at each call.
        population._update(torch.zeros(len(population)), due)
        return True


def limit_norms(population: Population, rows: Sequence[int], norms: HyperValue) -> None:
    """Set the largest gradient norms of members, from the next update on. Raises ValueError for one below 0."""
    with population._lock:
        limits = population._limits
        values = None if limits.value is None else limits.value.values[list(rows)]
        population._limits = limits.with_rows(rows, norms, values)

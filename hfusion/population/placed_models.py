"""Placement of models in rows of an array of a population."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from hfusion.array.joining_models import check_one_kind
from hfusion.core.errors import FusionError
from hfusion.optim.added_stacks import stacks_to_take, take_stacks

if TYPE_CHECKING:
    from hfusion.population.population import ArrayGroup


def place_models(array: ArrayGroup, rows: Sequence[int], models: Sequence[nn.Module]) -> None:
    """Put ``models`` in ``rows`` of an array, and add the parameters that they bring to its optimizer.

    Raises:
        FusionError: a model cannot join, or it is not clear which param group takes its parameters. The array is
            unchanged then.
    """
    if not array.takes_variants:
        check_one_kind(array.fused, rows, models)
        array.fused.put(rows, models)
        return
    _check_groups(array, models)
    array.fused.put(rows, models)
    take_stacks(array.optimizer, stacks_to_take(array.optimizer, None))


def _check_groups(array: ArrayGroup, models: Sequence[nn.Module]) -> None:
    parameters = dict(array.fused.named_parameters())
    added = dict.fromkeys(
        n for model in models for n, p in model.named_parameters() if p.requires_grad and n not in parameters
    )
    held = {id(param) for group in array.optimizer.param_groups for param in group["params"]}
    partial = any(p.requires_grad and id(p) not in held for p in parameters.values())
    if added and (partial or len(array.optimizer.param_groups) > 1):
        raise FusionError(
            f"the models that join have parameters of their own ({', '.join(added)}), and the optimizer of the array "
            "has several param groups, or holds some parameters only"
        )

"""Weights in a loss: of calls that make an update together, and of samples, which count as often as theirs says."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.compiler.arguments import map_leaf, row_of_leaf
from hfusion.core.calls import Ragged, StackedInput, entry_counts, is_stacked, stacked
from hfusion.device.backend import sent

# Their mean is over the weights of the targets' classes, without targets that are ignored.
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_CLASS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)


def weighted(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``loss`` for targets with a weight: with the same values, and gradients multiplied by the weight."""

    @wraps(loss, updated=())
    def weighted_loss(output: Any, target: Any) -> Any:
        value = loss(output, target["target"])
        held = value.detach()
        # The added term is zero for every finite weight; a value that is not finite stays so.
        weight = target["weight"].to(torch.promote_types(value.dtype, torch.float32))
        return held + (value - held) * weight

    return weighted_loss


def weigh_samples(target: Any, weights: Any, device: torch.device) -> dict[str, Any]:
    """Return ``target`` with the weights of its samples, for `sample_weighted`; None: all samples count as 1."""
    return {"target": target, "samples": map_leaf(weights, lambda tensor: sent(tensor, device))}


def check_keyword(kind: type[nn.Module], name: str) -> None:
    """Raise ValueError if the members' forward takes a keyword that `Population.step` takes itself."""
    if name in _parameters(kind.forward):
        raise ValueError(
            f"{name}= is for step, and forward of {kind.__name__} has a parameter of that name: give it by "
            "position, in inputs"
        )


def rows_of_weights(weights: Any, rows: Sequence[int], free: Sequence[int]) -> Any:
    """Return weights marked as one row per member, unless they are ``[N]`` for all.

    Raises ValueError unless there are weights for each of ``rows``, and those of members can be used.
    """
    if not isinstance(weights, Tensor | StackedInput | Ragged | list | tuple | np.ndarray):
        raise ValueError(f"weights={weights!r:.80}: give [N] numbers for all members, or [members, N]")
    if isinstance(weights, list | tuple) and len(weights):
        each = [row if isinstance(row, Tensor) else torch.as_tensor(row, device="cpu") for row in weights]
        weights = torch.stack(each) if all(row.dim() == 0 for row in each) else stacked(each)
    if not isinstance(weights, StackedInput | Ragged):
        weights = weights if isinstance(weights, Tensor) else torch.as_tensor(weights, device="cpu")
        if weights.dim() not in (1, 2):
            raise ValueError(f"weights of shape {list(weights.shape)}: give [N] for all members, or [members, N]")
        weights = weights if weights.dim() == 1 else stacked(weights)
    for count in entry_counts(weights):
        if count != len(rows):
            raise ValueError(f"weights have {count} rows for {len(rows)} members: give one for each, in their order")
    for entry, row in enumerate(rows):
        values = row_of_leaf(weights, entry).detach()
        if row not in free and not bool(((values >= 0) & values.isfinite()).all()):
            raise ValueError(f"weights of member {row}: {values.tolist()!s:.80}; they are finite, and at least 0")
        if row not in free and not bool(values.any()):
            raise ValueError(
                f"weights of member {row} are 0 for all of its samples, of which there is no mean: leave it out of the "
                "step, by rows="
            )
    return weights


def sample_weighted(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss for targets of `weigh_samples`: of mean losses, the sum of weights times losses by that of weights.

    Raises ValueError for a loss that has no values of single samples.
    """
    single, names = _single_losses(loss), ("reduction", "weight", "ignore_index")
    is_module = isinstance(loss, nn.Module)
    given: dict[str, Any] = {n: getattr(loss, n, None) for n in names} if is_module else _parameters(loss)
    reduction, function = given.get("reduction"), loss.func if isinstance(loss, functools.partial) else loss
    of_classes = isinstance(loss, _CLASS_MODULES) or any(function is class_loss for class_loss in _OF_CLASSES)

    @wraps(loss, updated=())
    def weighted_loss(output: Any, target: Any) -> Any:
        expected, weights = target["target"], target["samples"]
        if weights is None:
            return loss(output, expected)
        removed = weights == 0
        losses = single(_without(output, removed), expected)
        # len() would need to know a size that may vary.
        if losses.dim() == 0 or losses.shape[0] != weights.shape[0]:
            raise ValueError(
                f"{len(weights)} weights for losses of shape {list(losses.shape)}: weights= takes one for each sample, "
                "and a loss that returns [N] or takes reduction="
            )
        share = _like(weights, losses).to(torch.promote_types(losses.dtype, weights.dtype)).to(losses.dtype)
        total = torch.where(_like(removed, losses), 0, losses * share).sum()
        if reduction == "sum":
            return total
        counts = torch.ones_like(losses)
        if of_classes:
            counts = _class_counts(losses, expected, given["weight"], given["ignore_index"])
        if reduction == "batchmean":
            counts = counts / counts[0].numel()
        return total / (counts * share).sum()

    return weighted_loss


def _single_losses(loss: Callable[..., Any]) -> Callable[..., Any]:
    """``loss`` without its reduction: one value per sample, or one per element."""
    if loss is F.ctc_loss or isinstance(loss, nn.CTCLoss):
        raise ValueError("ctc_loss divides by the lengths of targets: with weights=, give a loss that returns [N]")
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        single: Any = copy.copy(loss)
        single.reduction = "none"
        return single  # type: ignore[no-any-return]
    if "reduction" in _parameters(loss):
        return functools.partial(loss, reduction="none")
    return loss


def _parameters(loss: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of the function's parameters."""
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return {}
    return {name: parameter.default for name, parameter in parameters.items()}


def _class_counts(losses: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the weight of each element in a mean of cross entropies, in the shape of the losses."""
    if target.shape != losses.shape or target.is_floating_point():
        return torch.ones_like(losses)
    counted = target != ignore_index
    if weight is None:
        return counted.to(losses.dtype)
    return torch.where(counted, weight[torch.where(counted, target, 0)], 0).to(losses.dtype)


def _without(output: Any, removed: Tensor) -> Any:
    """Return ``output`` with zeros for removed samples, so that their NaNs reach no gradient."""

    def clear(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.shape[:1] == removed.shape and leaf.is_floating_point():
            return torch.where(_like(removed, leaf), 0, leaf)
        return leaf

    return pytree.tree_map(clear, output, is_leaf=is_stacked)


def _like(values: Tensor, other: Tensor) -> Tensor:
    """Return ``values [N]`` as ``[N, 1, ...]`` with as many dims as ``other``."""
    return values.reshape(-1, *[1] * (other.dim() - 1))

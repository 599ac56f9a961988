"""Losses. Reduced over a member's own elements, a loss is ``[B]``; not reduced it is ``[B, *S]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from hfusion.core.layout import Layout
from hfusion.ops.rule import (
    Call,
    Operand,
    Rule,
    RuleTable,
    Site,
    Value,
    has_per_member,
    in_order,
    loop,
    map_values,
    scalars_alike,
    table,
)

aten = torch.ops.aten

STACKED = Layout.STACKED

# Fewer classes than this do not fill a vector register: a softmax along the samples is then faster.
FEW_CLASSES = 16

# The reductions of ATen's losses, by number.
NONE, MEAN, SUM = 0, 1, 2


def reduce(x: Tensor, reduction: int) -> Tensor:
    """``[B, *S]`` -> ``[B]``, or ``[B, *S]`` without reduction."""
    if reduction == NONE or x.dim() == 1:
        return x
    dims = tuple(range(1, x.dim()))
    return x.sum(dims) if reduction == SUM else x.mean(dims)


@scalars_alike
def elementwise(site: Site, **arguments: Any) -> Call:
    """Losses of elements or rows that broadcast, with the batch dims in front."""
    rank = max(v.rank for v in arguments.values() if isinstance(v, Value))
    # Weights of classes broadcast as they are; the losses themselves want operands of one shape.
    stacked = map_values(arguments, lambda v: v if v.shared and v.rank < rank else v.to(STACKED, rank=rank))
    return _reduced(site, elementwise_stacked, stacked)


def _reduced(site: Site, fn: Callable[..., Tensor], arguments: dict[str, Any]) -> Call:
    reduction = arguments["reduction"]
    args, kwargs = in_order(site, {**arguments, "reduction": NONE})
    return site.call(fn, (site.target, reduction, *args), STACKED, "stacked", kwargs)


def elementwise_stacked(target: OpOverload, reduction: int, *args: Any, **kwargs: Any) -> Tensor:
    """Operands ``[B, *S]``, or shared and broadcastable to it -> ``[B]`` or ``[B, *S]``."""
    return reduce(target(*args, **kwargs), reduction)


def rows(rank: int, shared: tuple[str, ...] = ()) -> Rule:
    """The rule of losses of rows ``[N, C]``, whose first operand has ``rank`` dims where there is an N.

    The operands named in ``shared`` (weights of classes) are the same for all rows; where they differ between
    members, the members run in a loop.
    """

    def rule(site: Site, **arguments: Any) -> Call:
        fixed = [arguments[name] for name in shared if arguments[name] is not None]
        first = next(v for v in arguments.values() if isinstance(v, Value))
        if has_per_member(arguments) or first.rank == 0 or not all(value.shared for value in fixed):
            return loop(site, arguments)
        operands = {
            name: v.to(STACKED) if isinstance(v, Value) and name not in shared else v for name, v in arguments.items()
        }
        return _reduced(site, rows_folded if first.rank == rank else elementwise_stacked, operands)

    return rule


def rows_folded(target: OpOverload, reduction: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Operands ``[B, N, ...]``, class weights ``[C]`` -> ``[B]`` or ``[B, N]``."""
    members, samples = x.shape[:2]
    folded = (a.flatten(0, 1) if isinstance(a, Tensor) and a.shape[:2] == (members, samples) else a for a in args)
    return reduce(target(x.flatten(0, 1), *folded, **kwargs).view(members, samples), reduction)


def classes(site: Site, self: Value, target: Value, weight: Value | None, **arguments: Any) -> Call:
    """Cross-entropy and negative log-likelihood, of class indices or probabilities of classes."""
    if has_per_member(arguments) or (weight is not None and not weight.shared):
        return loop(site, {"self": self, "target": target, "weight": weight, **arguments})
    fn = site.target if site.target is aten.cross_entropy_loss.default else aten.nll_loss_nd.default
    reduction = arguments.pop("reduction")
    options = tuple(arguments.values())
    x = self.to(STACKED)
    if target.rank == self.rank:
        operands = (fn, reduction, x, target.to(STACKED), weight, options)
        return site.call(of_probabilities, operands, STACKED)
    indices: Value | Operand = target if target.shared else target.to(STACKED)
    return site.call(of_indices, (fn, reduction, x, indices, target.shared, weight, options), STACKED)


def of_probabilities(
    target: OpOverload,
    reduction: int,
    x: Tensor,
    probabilities: Tensor,
    weight: Tensor | None,
    options: tuple[Any, ...],
) -> Tensor:
    """``x`` and ``probabilities`` ``[B, N, C, *]`` -> ``[B]`` or ``[B, N, *]``; a mean is over all positions."""
    if x.dim() == 2:
        return target(x, probabilities, weight, NONE, *options)  # type: ignore[no-any-return]
    losses = target(x.flatten(0, 1), probabilities.flatten(0, 1), weight, NONE, *options)
    return reduce(losses.unflatten(0, x.shape[:2]), reduction)


def of_indices(
    target: OpOverload,
    reduction: int,
    x: Tensor,
    indices: Tensor,
    shared: bool,
    weight: Tensor | None,
    options: tuple[Any, ...],
) -> Tensor:
    """``x [B, N, C, *]``, ``indices [B, N, *]``, or ``[N, *]`` if ``shared`` -> ``[B]`` or ``[B, N, *]``.

    A mean is weighted, with zero where ``indices`` hold the index to be ignored (the first of the ``options``);
    a member that has only those gets NaN, as from torch.nn.CrossEntropyLoss.
    """
    labels = indices.expand(x.shape[0], *indices.shape) if shared else indices
    losses: Tensor
    if x.dim() == 2:
        losses = target(x, labels, weight, NONE, *options)
    elif x.dim() == 3 and (x.stride(1) == 1 or x.shape[2] < FEW_CLASSES):
        # The members as the batch, the samples as a dim behind the classes.
        losses = target(x.mT, labels, weight, NONE, *options)
    else:
        losses = target(x.flatten(0, 1), labels.flatten(0, 1), weight, NONE, *options).view(labels.shape)
    if reduction != MEAN:
        return reduce(losses, reduction)
    indices = indices.unsqueeze(0) if shared else indices
    counted = picked = indices.ne(options[0])
    if weight is not None:
        picked = weight.take(indices.masked_fill(~counted, 0)).masked_fill(~counted, 0)
    return reduce(losses, SUM) / reduce(picked, SUM)


ELEMENTWISE = (
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.kl_div.default,
    aten.poisson_nll_loss.default,
    aten.soft_margin_loss.default,
    aten.hinge_embedding_loss.default,
    aten.margin_ranking_loss.default,
    aten.triplet_margin_loss.default,
)

RULES: RuleTable = {
    **table(ELEMENTWISE, elementwise),
    aten.cross_entropy_loss.default: classes,
    aten.nll_loss_nd.default: classes,
    aten.nll_loss.default: classes,
    aten.nll_loss2d.default: classes,
    aten.cosine_embedding_loss.default: rows(2),
    aten.multi_margin_loss.default: rows(2, shared=("weight",)),
    aten.multilabel_margin_loss.default: rows(2),
}

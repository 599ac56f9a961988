"""Reductions, and operators along dims that keep the shape: softmax, cumulative sums, sorting.

A full reduction of one member reduces all dims behind the member dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from hfusion.core.layout import Layout
from hfusion.ops.rule import Answer, Call, Rule, RuleTable, Site, Value, loop, none_listed, pointwise, table
from hfusion.ops.shape import NEEDS_0_1, NEEDS_1, along, shifted

aten = torch.ops.aten


@none_listed
def over(site: Site, *, self: Value, dim: Any, **rest: Any) -> Answer:
    """Reduce along ``dim``, one or several dims; None or an empty list means all dims of a member."""
    arguments = {"self": self, "dim": dim, **rest}
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return all_dims(site, arguments)
    if self.rank == 0:
        return loop(site, arguments)
    keeps = bool(rest.get("keepdim", False))
    return _ALONG[keeps](site, **arguments)


_ALONG = {False: along("dim", packed=NEEDS_0_1), True: along("dim", packed=NEEDS_1)}


def all_dims(site: Site, arguments: dict[str, Any]) -> Call:
    """Reduce all dims of a member; a 0-dim tensor gets a dim of size 1 to reduce."""
    x: Value = arguments["self"]
    if x.rank == 0 and arguments.get("keepdim"):
        return loop(site, arguments)
    rank = max(x.rank, 1)
    reduced = {"self": x.to(Layout.STACKED, rank=rank), "dim": list(range(1, rank + 1))}
    return site.same_call({**arguments, **reduced}, Layout.STACKED)


def over_dims(site: Site, *, self: Value, dim: Any, keepdim: bool) -> Answer:
    """``all`` and ``any`` over several dims; unlike for other reductions, an empty list reduces nothing."""
    if dim is not None and not dim:
        return pointwise(site, self=self, dim=dim, keepdim=keepdim)
    return over(site, self=self, dim=dim, keepdim=keepdim)


def full(by: OpOverload) -> Rule:
    """Return the rule of a full reduction without ``dim``, computed by its overload ``by`` with ``dim``."""

    @none_listed
    def rule(site: Site, *, self: Value, **rest: Any) -> Call | None:
        return all_dims(Site(by, site.members, site.example), {"self": self, "keepdim": False, **rest})

    return rule


def flat(by: OpOverload) -> Rule:
    """Return the rule of a full reduction whose overload ``by`` takes a single dim: flatten the member, reduce that."""

    @none_listed
    def rule(site: Site, *, self: Value, dim: int | None = None, keepdim: bool = False, **rest: Any) -> Answer:
        arguments = {"self": self, "dim": dim, "keepdim": keepdim, **rest}
        if dim is not None:
            return over(site, **arguments)
        if keepdim:
            return loop(site, arguments)
        return site.call(over_flat, (by, self.to(Layout.STACKED), rest), Layout.STACKED)

    return rule


def over_flat(target: OpOverload, x: Tensor, options: dict[str, Any]) -> Tensor:
    """Call ``target`` on the flattened tensor of each member of ``x [B, ...]``."""
    result: Tensor = target(x.reshape(x.shape[0], -1), 1, **options)
    return result


def overloads(*packets: Any) -> Sequence[OpOverload]:
    """Return the functional overloads of these operators that take ``dim`` as a number."""
    targets = []
    for packet in packets:
        for name in packet.overloads():
            target = getattr(packet, name)
            types = {a.name: str(a.type) for a in target._schema.arguments}
            numbered = "int" in types.get("dim", "").lower()
            if numbered and not target._schema.is_mutable and "generator" not in types:
                targets.append(target)
    return targets


_SHAPE_KEEPING = overloads(
    *(aten.softmax, aten.log_softmax, aten._softmax, aten._log_softmax),
    *(aten.special_softmax, aten.special_log_softmax, aten.cumsum, aten.cumprod, aten.logcumsumexp),
    *(aten.cummax, aten.cummin, aten.sort, aten.argsort, aten.topk),
)

_REDUCING = overloads(
    *(aten.sum, aten.mean, aten.nansum, aten.nanmean, aten.amax, aten.amin, aten.logsumexp),
    *(aten.special_logsumexp, aten.var, aten.std, aten.var_mean, aten.std_mean, aten.norm),
    *(aten.linalg_vector_norm, aten.max, aten.min, aten.median, aten.nanmedian, aten.mode, aten.kthvalue),
)


# Distances and similarities between rows.


@none_listed
def cosine_similarity(site: Site, *, x1: Value, x2: Value, dim: int, eps: float) -> Call:
    """Broadcasts ``x1`` and ``x2``; ``dim`` counts in the result of that."""
    rank = max(x1.rank, x2.rank)
    if rank == 0:
        return loop(site, {"x1": x1, "x2": x2, "dim": dim, "eps": eps})
    a, b = (v if v.shared else v.to(Layout.STACKED, rank=rank) for v in (x1, x2))
    return site.call(site.target, (a, b, shifted(dim, rank), eps), Layout.STACKED)


@none_listed
def pairwise_distance(site: Site, *, x1: Value, x2: Value, p: float, eps: float, keepdim: bool) -> Call:
    """Broadcasts ``x1`` and ``x2``, and reduces the last dim."""
    rank = max(x1.rank, x2.rank)
    a, b = (v if v.shared else v.to(Layout.STACKED, rank=rank) for v in (x1, x2))
    return site.call(site.target, (a, b, p, eps, keepdim), Layout.STACKED)


RULES: RuleTable = {
    aten.cosine_similarity.default: cosine_similarity,
    aten.pairwise_distance.default: pairwise_distance,
    **table(_SHAPE_KEEPING, along("dim", packed=NEEDS_1)),
    **table(_REDUCING, over),
    **table((aten.all.dim, aten.any.dim, aten.prod.dim_int, aten.count_nonzero.dim_IntList), over),
    **table((aten.all.dims, aten.any.dims), over_dims),
    aten.sum.default: full(aten.sum.dim_IntList),
    aten.mean.default: full(aten.mean.dim),
    aten.max.default: full(aten.amax.default),
    aten.min.default: full(aten.amin.default),
    aten.all.default: full(aten.all.dims),
    aten.any.default: full(aten.any.dims),
    aten.var.default: full(aten.var.dim),
    aten.std.default: full(aten.std.dim),
    aten.var_mean.default: full(aten.var_mean.dim),
    aten.std_mean.default: full(aten.std_mean.dim),
    aten.norm.Scalar: full(aten.norm.ScalarOpt_dim),
    aten.norm.ScalarOpt_dtype: full(aten.norm.ScalarOpt_dim_dtype),
    **table((aten.argmax.default,), flat(aten.argmax.default)),
    **table((aten.argmin.default,), flat(aten.argmin.default)),
    aten.prod.default: flat(aten.prod.dim_int),
}

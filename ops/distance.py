"""Distances and similarities between rows."""

from __future__ import annotations

import torch

from hfusion.core.layout import Layout
from hfusion.ops.rule import Call, RuleTable, Site, Value, has_per_member, loop
from hfusion.ops.shape import shifted

aten = torch.ops.aten


def cosine_similarity(site: Site, *, x1: Value, x2: Value, dim: int, eps: float) -> Call:
    """Broadcasts ``x1`` and ``x2``; ``dim`` counts in the result of that."""
    rank = max(x1.rank, x2.rank)
    if rank == 0 or has_per_member((dim, eps)) or Layout.LISTED in (x1.layout, x2.layout):
        return loop(site, {"x1": x1, "x2": x2, "dim": dim, "eps": eps})
    a, b = (v if v.shared else v.to(Layout.STACKED, rank=rank) for v in (x1, x2))
    return site.call(site.target, (a, b, shifted(dim, rank), eps), Layout.STACKED, "stacked")


def pairwise_distance(site: Site, *, x1: Value, x2: Value, p: float, eps: float, keepdim: bool) -> Call:
    """Broadcasts ``x1`` and ``x2``, and reduces the last dim."""
    if has_per_member((p, eps, keepdim)) or Layout.LISTED in (x1.layout, x2.layout):
        return loop(site, {"x1": x1, "x2": x2, "p": p, "eps": eps, "keepdim": keepdim})
    rank = max(x1.rank, x2.rank)
    a, b = (v if v.shared else v.to(Layout.STACKED, rank=rank) for v in (x1, x2))
    return site.call(site.target, (a, b, p, eps, keepdim), Layout.STACKED, "stacked")


RULES: RuleTable = {
    aten.cosine_similarity.default: cosine_similarity,
    aten.pairwise_distance.default: pairwise_distance,
}

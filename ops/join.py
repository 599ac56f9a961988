"""Joins and repetitions: of several tensors, or of one with itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.core.layout import Layout
from hfusion.ops.rule import Call, Rule, RuleTable, Site, Value, has_per_member, loop, table
from hfusion.ops.shape import normal, of_operator

aten = torch.ops.aten


def repeat(site: Site, *, self: Value, **repeats: Any) -> Call | None:
    """``repeat`` and ``tile``."""
    (counts,) = repeats.values()
    counts = [1] * (self.rank - len(counts)) + list(counts)
    if self.layout is Layout.LISTED or has_per_member(counts):
        return loop(of_operator(site, aten.repeat.default), {"self": self, "repeats": counts})
    x = self.to(Layout.STACKED, rank=len(counts))
    return site.call(aten.repeat.default, (x, [1, *counts]), Layout.STACKED, "stacked")


def repeat_interleave(site: Site, *, self: Value, repeats: Any, dim: int | None, **rest: Any) -> Call | None:
    if self.layout is Layout.LISTED or self.rank == 0 or has_per_member((repeats, dim)):
        return loop(site, {"self": self, "repeats": repeats, "dim": dim, **rest})
    x = self.to(Layout.STACKED)
    if dim is None:
        return site.call(repeat_flat, (x, repeats), Layout.STACKED, "stacked")
    return site.call(site.target, (x, repeats, normal(dim, self.rank) + 1), Layout.STACKED, "stacked", rest)


def repeat_flat(x: Tensor, repeats: int) -> Tensor:
    """Flatten each member's tensor and repeat every element ``repeats`` times: ``[B, numel * repeats]``."""
    return x.flatten(1).repeat_interleave(repeats, 1)


def cat(site: Site, *, tensors: Sequence[Value], dim: int) -> Call | None:
    """Members side by side in the channels can be joined along them too."""
    rank = site.rank
    if any(v.layout is Layout.LISTED or v.rank != rank for v in tensors):
        return loop(of_operator(site, aten.cat.default), {"tensors": tensors, "dim": dim})
    wrapped_dim = normal(dim, rank)
    if all(v.layout is Layout.PACKED for v in tensors):
        if wrapped_dim == 1:
            return site.call(cat_channels, (list(tensors), site.members), Layout.PACKED, "packed")
        return site.call(aten.cat.default, (list(tensors), wrapped_dim), Layout.PACKED, "packed")
    stacked = [v.to(Layout.STACKED) for v in tensors]
    return site.call(aten.cat.default, (stacked, wrapped_dim + 1), Layout.STACKED, "stacked")


def cat_channels(tensors: Sequence[Tensor], members: int) -> Tensor:
    """``[N, B*C_i, ...]`` to ``[N, B*sum(C_i), ...]``, each member's channels together."""
    return torch.cat([torch.unflatten(x, 1, (members, -1)) for x in tensors], 2).flatten(1, 2)


def stack(site: Site, *, tensors: Sequence[Value], dim: int) -> Call | None:
    if any(v.layout is Layout.LISTED for v in tensors):
        return loop(of_operator(site, aten.stack.default), {"tensors": tensors, "dim": dim})
    wrapped_dim = normal(dim, site.rank)
    if wrapped_dim >= 2 and all(v.layout is Layout.PACKED for v in tensors):
        return site.call(aten.stack.default, (list(tensors), wrapped_dim), Layout.PACKED, "packed")
    stacked = [v.to(Layout.STACKED) for v in tensors]
    return site.call(aten.stack.default, (stacked, wrapped_dim + 1), Layout.STACKED, "stacked")


def cat_along(dim: int, least: int) -> Rule:
    """Return the rule of ``hstack``, ``vstack`` or ``dstack``: `cat` along ``dim`` if members have ``least`` dims."""

    def rule(site: Site, *, tensors: Sequence[Value]) -> Call | None:
        if any(v.rank < least for v in tensors):
            return loop(site, {"tensors": tensors})
        return cat(site, tensors=tensors, dim=dim)

    return rule


RULES: RuleTable = {
    **table((aten.repeat.default, aten.tile.default), repeat),
    aten.repeat_interleave.self_int: repeat_interleave,
    **table((aten.cat.default, aten.concat.default, aten.concatenate.default), cat),
    aten.stack.default: stack,
    aten.hstack.default: cat_along(1, 2),
    aten.vstack.default: cat_along(0, 2),
    aten.dstack.default: cat_along(2, 3),
}

"""Tables looked up by index."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfusion.core.layout import Layout
from hfusion.ops.rule import Call, MemberScalars, RuleTable, Site, Value, loop

aten = torch.ops.aten

STACKED = Layout.STACKED


def embedding(
    site: Site, weight: Value, indices: Value, padding_idx: Any, scale_grad_by_freq: bool, sparse: bool
) -> Call:
    if sparse or isinstance(padding_idx, MemberScalars) or (weight.shared and scale_grad_by_freq):
        return loop(
            site,
            {
                "weight": weight,
                "indices": indices,
                "padding_idx": padding_idx,
                "scale_grad_by_freq": scale_grad_by_freq,
                "sparse": sparse,
            },
        )
    if weight.shared:
        return site.call(F.embedding, (indices.to(STACKED), weight, _index(padding_idx)), STACKED, "shared table")
    arguments = (weight.to(STACKED), padding_idx, scale_grad_by_freq)
    if indices.shared and not scale_grad_by_freq:
        return site.call(rows_of_all, (indices, *arguments[:2]), STACKED, "index_select")
    return site.call(own_rows, (indices.to(STACKED), *arguments), STACKED, "one table of all members' rows")


def _index(padding_idx: int) -> int | None:
    """ATen writes -1 for no padding, `torch.nn.functional` counts it from the end."""
    return padding_idx if padding_idx >= 0 else None


def rows_of_all(indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    """``indices [*]``, the same for all, ``weight [B, V, D]`` -> ``[B, *, D]``."""
    rows = weight.index_select(1, indices.reshape(-1)).view(weight.shape[0], *indices.shape, weight.shape[-1])
    return _without_padding(rows, indices, padding_idx)


def own_rows(indices: Tensor, weight: Tensor, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
    """``indices [B, *]``, ``weight [B, V, D]`` -> ``[B, *, D]``."""
    members, size, width = weight.shape
    # Looking each index up in 0 .. V-1 raises for an index that would reach into another member's rows.
    checked = torch.arange(size, device=weight.device).index_select(0, indices.reshape(-1)).view(indices.shape)
    first = torch.arange(0, members * size, size, device=weight.device)
    flat = checked + first.view(-1, *(1,) * (indices.dim() - 1))
    table = weight.reshape(-1, width)
    if scale_grad_by_freq:
        rows = aten.embedding.default(table, flat, -1, True)
    else:
        rows = table.index_select(0, flat.view(-1)).view(*flat.shape, width)
    return _without_padding(rows, indices, padding_idx)


def _without_padding(rows: Tensor, indices: Tensor, padding_idx: int) -> Tensor:
    """Keep the gradient from the padding's rows; ``rows [B, *, D]``, ``indices [B, *]`` or ``[*]``."""
    if padding_idx < 0:
        return rows
    return torch.where(indices.eq(padding_idx).unsqueeze(-1), rows.detach(), rows)


def bag(site: Site, **arguments: Any) -> Call:
    return loop(site, arguments)


RULES: RuleTable = {
    aten.embedding.default: embedding,
    aten.embedding_bag.default: bag,
    aten.embedding_bag.padding_idx: bag,
}

"""Scaled dot-product attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hfusion.core.layout import Layout
from hfusion.device.backend import attention_drops
from hfusion.ops.attention_dropout import (
    attend,
    attend_by_blocks,
    attend_dropping,
    attend_with_dropout,
    attention_weights,
    block_workspace,
    each_head,
    keeps_weights,
)
from hfusion.ops.lowering import Efficiency, KeptOperands, Saves, Sizes
from hfusion.ops.random import Probability
from hfusion.ops.rule import Answer, Call, MemberScalars, RuleTable, Site, Value, has_per_member, hint, loop
from hfusion.ops.saved import elements, scores

aten = torch.ops.aten

STACKED = Layout.STACKED

# Tokens up to which attention may be written out, so that its weights are kept: beyond, it is no faster.
WRITTEN_OUT_UP_TO = 64


# Operations for each score beside those of the products and the traffic, on one core of a Xeon. Written out it is the
# faster (0.6 to 0.9 of the time) of heads that lie apart, and the slower (1.0 to 1.3) of heads side by side, as one
# layer for all gives them.
FUSED = Efficiency(more=lambda sizes: 1050 * scores(sizes))
WRITTEN_OUT = Efficiency(more=lambda sizes: 1350 * scores(sizes))


def _weights_thrice(sizes: Sizes) -> int:
    """The weights before, in and after the dropout, and the scaled queries."""
    return 3 * scores(sizes) * sizes.width + elements(sizes.operands["query"]) * sizes.width


def _weights_twice(sizes: Sizes) -> int:
    return 2 * scores(sizes) * sizes.width


WRITTEN_OUT_KEEPS = Saves(KeptOperands.FACTORS, result=True, extra_bytes=_weights_thrice, workspace=_weights_twice)


def attention(
    site: Site,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> Answer:
    if has_per_member((is_causal, scale, enable_gqa)):
        operands = {
            "query": query,
            "key": key,
            "value": value,
            "attn_mask": attn_mask,
            "dropout_p": dropout_p,
        }
        return loop(site, {**operands, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa})
    rank = max(v.rank for v in (query, key, value))
    q, k, v = (x.to(STACKED, rank=rank) for x in (query, key, value))
    mask = attn_mask if attn_mask is None or attn_mask.shared else attn_mask.to(STACKED, rank=rank)
    arguments = (q, k, v, mask, is_causal, scale, enable_gqa)
    if isinstance(dropout_p, MemberScalars) or dropout_p > 0:
        return _with_dropout(site, dropout_p, query, key, arguments)
    folded = site.call(attend, arguments, STACKED, "members as batch", efficiency=FUSED)
    if not _short(query) or not _short(key):
        return folded
    written_out = site.call(
        attend_written_out, arguments, STACKED, "written out", efficiency=WRITTEN_OUT, saves=WRITTEN_OUT_KEEPS
    )
    return folded, written_out


def _with_dropout(site: Site, dropout_p: Any, query: Value, key: Value, arguments: tuple[Any, ...]) -> Call:
    """Write out attention over short sequences, and never keep the attention weights of long ones."""
    per_member = isinstance(dropout_p, MemberScalars)
    p: Probability = tuple(map(float, dropout_p.values)) if per_member else float(dropout_p)
    example = site.example
    if attention_drops(example.device, example.dtype) and not (_short(query) and _short(key)):
        return site.call(attend_dropping, (p, *arguments), STACKED, "members as batch, own draws")
    inputs = (p, site.members, *arguments)
    if keeps_weights(site.members, example, key):
        return site.call(attend_with_dropout, inputs, STACKED, "written out, own draws", saves=WRITTEN_OUT_KEEPS)
    saves = Saves(KeptOperands.ALL, workspace=partial(block_workspace, site.members))
    return site.call(attend_by_blocks, inputs, STACKED, "by blocks of queries, own draws", saves=saves)


def _short(x: Value) -> bool:
    """True if ``x [*, T, E]`` is short enough to keep the attention weights ``[*, T, S]`` for backward."""
    length = hint(x.shape[-2])
    return length is not None and length <= WRITTEN_OUT_UP_TO


def attend_written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    """Compute `attend` by two products and a softmax: faster for few tokens, if heads are not adjacent in memory."""
    k, v = each_head(q, k, v) if gqa else (k, v)
    return torch.matmul(attention_weights(q, k, mask, causal, scale), v)


RULES: RuleTable = {aten.scaled_dot_product_attention.default: attention}

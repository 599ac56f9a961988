"""Scaled dot-product attention."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfusion.core.layout import Layout
from hfusion.device.backend import attention_drops
from hfusion.ops.lowering import Efficiency, KeptOperands, Saves, Sizes
from hfusion.ops.random import Probability, dropout_stacked
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


def attention(site: Site, **arguments: Any) -> Answer:
    query, key, value, attn_mask, dropout_p, *options = arguments.values()
    if has_per_member(options):
        return loop(site, arguments)
    rank = max(v.rank for v in (query, key, value))
    q, k, v = (x.to(STACKED, rank=rank) for x in (query, key, value))
    mask = attn_mask if attn_mask is None or attn_mask.shared else attn_mask.to(STACKED, rank=rank)
    inputs = (q, k, v, mask, *options)
    if isinstance(dropout_p, MemberScalars) or dropout_p > 0:
        return _with_dropout(site, dropout_p, query, key, inputs)
    folded = site.call(attend, inputs, STACKED, "members as batch", efficiency=FUSED)
    if not _short(query) or not _short(key):
        return folded
    written_out = site.call(
        attend_written_out, inputs, STACKED, "written out", efficiency=WRITTEN_OUT, saves=WRITTEN_OUT_KEEPS
    )
    return folded, written_out


def _with_dropout(site: Site, dropout_p: Any, query: Value, key: Value, arguments: tuple[Any, ...]) -> Call:
    """Write out attention, so that every member draws its own numbers, unless torch's kernel for long ones does."""
    per_member = isinstance(dropout_p, MemberScalars)
    p: Probability = tuple(map(float, dropout_p.values)) if per_member else float(dropout_p)
    example = site.example
    if attention_drops(example.device, example.dtype) and not (_short(query) and _short(key)):
        return site.call(attend_dropping, (p, *arguments), STACKED, "members as batch, own draws")
    inputs = (p, site.members, *arguments)
    return site.call(attend_with_dropout, inputs, STACKED, "written out, own draws", saves=WRITTEN_OUT_KEEPS)


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


# Attention whose weights are dropped: written out, or by torch's fused kernel.


def attend_dropping(
    p: Probability, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    """Compute `attend` by torch's fused kernel, which draws different numbers for every member, head and query.

    Consecutive members with the same ``p`` share a call. Members with ``p`` of 1 drop everything and get zeros.
    """
    rates = [p] * q.shape[0] if isinstance(p, float) else p
    results = []
    for rate, group in itertools.groupby(range(q.shape[0]), key=rates.__getitem__):
        members = list(group)
        rows = slice(members[0], members[-1] + 1)
        some = mask[rows] if mask is not None and mask.dim() == q.dim() else mask
        y = attend(q[rows], k[rows], v[rows], some, causal, scale, gqa, 0.0 if rate == 1 else rate)
        results.append(y * 0 if rate == 1 else y)
    return results[0] if len(results) == 1 else torch.cat(results)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool, p: float = 0.0
) -> Tensor:
    """Call torch's attention with the members as a part of the batch.

    ``q [B, *, T, E]``, ``k [B, *, S, E]``, ``v [B, *, S, D]`` -> ``[B, *, T, D]``. ``mask`` is shared, with at most the
    dims of a member's ``q``, or ``[B, ...]`` with as many dims as ``q``.
    """
    if q.dim() != 5 or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        return F.scaled_dot_product_attention(q, k, v, mask, p, causal, scale=scale, enable_gqa=gqa)
    if mask is not None and mask.dim() >= 4:
        mask = mask.expand(*q.shape[:2], *mask.shape[-3:]).flatten(0, 1)
    q_flat, k_flat, v_flat = (x.flatten(0, 1) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q_flat, k_flat, v_flat, mask, p, causal, scale=scale, enable_gqa=gqa)
    return y.view(*q.shape[:-1], v.shape[-1])


def attend_with_dropout(
    p: Probability,
    members: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    """Compute `attend` with each member's weights dropped by its own draws, like torch's written-out attention."""
    k, v = each_head(q, k, v) if gqa else (k, v)
    weights = dropout_stacked(attention_weights(q, k, mask, causal, scale), p, members, False, False)
    return torch.matmul(weights, v)


def each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values that groups of heads share, once for each head."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    return k, v


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """Return the softmax of the scores; zero for a query that may attend to nothing."""
    scores = torch.matmul(q * (q.shape[-1] ** -0.5 if scale is None else scale), k.mT)
    if causal:
        scores = scores + scores.new_full(scores.shape[-2:], -math.inf).triu(1)
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1).masked_fill(scores.eq(-math.inf).all(-1, keepdim=True), 0)

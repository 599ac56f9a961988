"""Scaled dot-product attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfusion.core.layout import Layout
from hfusion.core.member_random import Keys, MemberSeeds, draw, is_recording, member_seeds, uniform_at
from hfusion.device.backend import attention_drops
from hfusion.ops.lowering import Efficiency, KeptOperands, Saves, Sizes
from hfusion.ops.random import Probability, column, dropout_stacked, dropped
from hfusion.ops.rule import Answer, Call, MemberScalars, RuleTable, Site, Value, has_per_member, hint, loop
from hfusion.ops.saved import elements, scores
from hfusion.torch_private.fake_tensors import FakeTensor
from hfusion.torch_private.functorch import in_transform

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


# Attention whose weights are dropped: written out, by blocks of queries, or by torch's fused kernel.

# Bytes of the weights of all members up to which they are written out, which is faster.
KEPT_BYTES = 256 << 20
# Of one block of them. On a CPU, blocks of 16 MiB took 1.03 times as long as writing out, of 64 MiB 1.6 times.
BLOCK_BYTES = 16 << 20
# Blocks of a traced step, where each is code to be compiled.
MAX_TRACED_BLOCKS = 8


def keeps_weights(members: int, result: Tensor, key: Value) -> bool:
    """Return whether the weights of all members are few enough to be kept; a member's ``result`` is ``[*, T, D]``."""
    sizes = [hint(size) for size in (*result.shape[:-1], key.shape[-2])]
    known_sizes = [size for size in sizes if size is not None]
    return len(known_sizes) < len(sizes) or members * math.prod(known_sizes) * result.element_size() <= KEPT_BYTES


def block_workspace(members: int, sizes: Sizes) -> int:
    """One member's bytes of the weights of a block before, in and after the dropout, and of their gradients."""
    return 5 * min(scores(sizes) * sizes.width, BLOCK_BYTES // members)


def attend_dropping(
    p: Probability,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    gqa: bool,
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    gqa: bool,
    p: float = 0.0,
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


def attend_by_blocks(
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
    """Compute `attend_with_dropout` block by block, with the weights of one block of queries in memory at a time."""
    traced = isinstance(q, FakeTensor)
    static = isinstance(q.shape[-2], int) and isinstance(k.shape[-2], int)
    if p == 1 or q.numel() == 0 or k.numel() == 0 or in_transform() or torch.compiler.is_compiling():
        return attend_with_dropout(p, members, q, k, v, mask, causal, scale, gqa)
    if traced and not static:
        return attend_with_dropout(p, members, q, k, v, mask, causal, scale, gqa)
    rows = _rows_of_block(q, k, traced)
    if rows >= q.shape[-2]:
        return attend_with_dropout(p, members, q, k, v, mask, causal, scale, gqa)
    blocks = QueryBlocks(p, causal, scale, gqa, rows, _noise(q, traced), _autocast(q.device.type))
    y: Tensor = BlockAttention.apply(blocks, q, k, v, mask)  # type: ignore[no-untyped-call]
    return y


def _rows_of_block(q: Tensor, k: Tensor, traced: bool) -> int:
    heads = math.prod(hint(size) or 1 for size in torch.broadcast_shapes(q.shape[:1], k.shape[:1]))
    heads *= math.prod(max(hint(a) or 1, hint(b) or 1) for a, b in zip(q.shape[1:-2], k.shape[1:-2], strict=True))
    queries = int(q.shape[-2])
    rows = max(1, BLOCK_BYTES // (heads * int(k.shape[-2]) * q.element_size()))
    return max(rows, math.ceil(queries / MAX_TRACED_BLOCKS)) if traced else rows


@dataclass(frozen=True)
class Noise:
    """Random numbers that can be drawn again: from ``keys`` of the members, or from a generator with a ``seed``."""

    keys: Keys | None
    seed: int = 0

    def draw_mask(self, weights: Tensor, first: int, queries: int, keep: float | Tensor) -> Tensor:
        """Draw 1 with probability ``keep``, else 0, for the ``weights [B, *, t, S]`` of queries from ``first`` on."""
        if self.keys is None:
            generator = torch.Generator(weights.device).manual_seed((self.seed + first) % (1 << 63))
            return torch.empty_like(weights, requires_grad=False).bernoulli_(keep, generator=generator)
        *heads, rows, length = weights.shape[1:]
        count = math.prod(heads)
        device = weights.device
        places = torch.arange(count, device=device).view(*heads, 1, 1) * (queries * length)
        places = places + torch.arange(first, first + rows, device=device).view(-1, 1) * length
        places = places + torch.arange(length, device=device)
        return (uniform_at(self.keys, places.unsqueeze(0), weights.dtype) < keep).to(weights.dtype)


def _noise(q: Tensor, traced: bool) -> Noise:
    source = member_seeds()
    if source is None and traced:
        source = MemberSeeds(torch.empty(q.shape[0], dtype=torch.int64, device=q.device).random_())
    if source is not None:
        return Noise(source.keys())
    return Noise(None, int(torch.empty((), dtype=torch.int64, device="cpu").random_()))


def _autocast(kind: str) -> tuple[str, torch.dtype] | None:
    active = torch.is_autocast_enabled(kind)
    return (kind, torch.get_autocast_dtype(kind)) if active else None


@dataclass(frozen=True)
class QueryBlocks:
    """Settings for the blocks of one call. ``rows``: queries of a block; ``cast``: the autocast around the call."""

    p: Probability
    causal: bool
    scale: float | None
    gqa: bool
    rows: int
    noise: Noise
    cast: tuple[str, torch.dtype] | None

    def spans(self, queries: int) -> Iterator[tuple[int, int]]:
        """Yield the first query of each block, and how many it has."""
        for first in range(0, queries, self.rows):
            yield first, min(self.rows, queries - first)

    def block(
        self, first: int, queries: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, noises: list[Tensor]
    ) -> Tensor:
        """Attend by the queries ``q [B, *, t, E]`` from ``first`` on, of ``queries``; ``noises`` takes up the noise."""
        with self._autocast():
            k, v = each_head(q, k, v) if self.gqa else (k, v)
            weights = attention_weights(q, k, mask, self.causal, self.scale, first)
            keep = 1 - self.p if isinstance(self.p, float) else 1 - column(self.p, weights)
            noise = self.noise.draw_mask(weights.detach(), first, queries, keep)
            if is_recording():
                noises.append(noise.clone())
            return torch.matmul(dropped(weights, noise, self.p, False), v)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, noises: list[Tensor]) -> Tensor:
        """Attend by all queries, block by block."""
        queries = int(q.shape[-2])
        spans = self.spans(queries)
        rows = [
            self.block(first, queries, q.narrow(-2, first, count), k, v, mask_rows(mask, queries, first, count), noises)
            for first, count in spans
        ]
        return torch.cat(rows, -2)

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.cast is None else torch.autocast(self.cast[0], self.cast[1])


class BlockAttention(torch.autograd.Function):
    """Attention that keeps its operands, and in backward computes one block after another again."""

    @staticmethod
    def forward(ctx: Any, blocks: QueryBlocks, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        ctx.blocks = blocks
        ctx.save_for_backward(q, k, v, mask)
        noises: list[Tensor] = []
        y = blocks.whole(q, k, v, mask, noises)
        if noises:
            draw(lambda: torch.cat(noises, -2))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inputs, blocks, needs_grad = ctx.saved_tensors, ctx.blocks, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            y = blocks.whole(*inputs, [])
            return None, *_gradients(y, inputs, needs_grad, grad, create_graph=True)
        q, k, v, mask = inputs
        queries = int(q.shape[-2])
        by_query: list[list[Tensor]] = [[], []]
        sums: list[Tensor | None] = [None, None, None]
        mask_by_query = has_rows(mask, queries)
        for first, count in blocks.spans(queries):
            some = (q.narrow(-2, first, count), k, v, mask_rows(mask, queries, first, count))
            leaves = [
                x if x is None else x.detach().requires_grad_(required)
                for x, required in zip(some, needs_grad, strict=True)
            ]
            with torch.enable_grad():
                y = blocks.block(first, queries, *leaves, [])
            d_q, d_k, d_v, d_mask = _gradients(y, leaves, needs_grad, grad.narrow(-2, first, count))
            for rows, part in zip(by_query, (d_q, d_mask if mask_by_query else None), strict=True):
                rows.extend([] if part is None else [part])
            terms = (d_k, d_v, None if mask_by_query else d_mask)
            sums = [_added(total, term) for total, term in zip(sums, terms, strict=True)]
        of_q, of_mask = (torch.cat(rows, -2) if rows else None for rows in by_query)
        return None, of_q, sums[0], sums[1], of_mask if mask_by_query else sums[2]


def has_rows(mask: Tensor | None, queries: int) -> bool:
    """Return whether a mask ``[*, T or 1, S]`` has a row for each query."""
    return mask is not None and mask.dim() >= 2 and mask.shape[-2] == queries


def mask_rows(mask: Tensor | None, queries: int, first: int, count: int) -> Tensor | None:
    """Return the rows of a mask for some of the queries."""
    return mask if mask is None or not has_rows(mask, queries) else mask.narrow(-2, first, count)


def _gradients(
    y: Tensor, inputs: Sequence[Tensor | None], needs_grad: Sequence[bool], grad: Tensor, create_graph: bool = False
) -> list[Tensor | None]:
    required_inputs = [x for x, required in zip(inputs, needs_grad, strict=True) if required and x is not None]
    gradients = iter(torch.autograd.grad(y, required_inputs, grad, create_graph=create_graph))
    return [next(gradients) if required else None for required in needs_grad]


def _added(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    return term if total is None or term is None else total + term


def each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values that groups of heads share, once for each head."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    return k, v


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None, first: int = 0
) -> Tensor:
    """Return the softmax of the scores of queries from ``first`` on; zero for one that may attend to nothing."""
    scores = torch.matmul(q * (q.shape[-1] ** -0.5 if scale is None else scale), k.mT)
    if causal:
        scores = scores + scores.new_full(scores.shape[-2:], -math.inf).triu(1 + first)
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-1).masked_fill(scores.eq(-math.inf).all(-1, keepdim=True), 0)

"""Padding, interpolation, and operators that move values between channels and pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.core.layout import Layout
from hfusion.ops.lowering import Efficiency
from hfusion.ops.rule import (
    Answer,
    Call,
    Fold,
    RuleTable,
    Site,
    Value,
    folding,
    has_per_member,
    loop,
    map_values,
    merge,
    none_listed,
    table,
)

aten = torch.ops.aten


@none_listed
def constant_pad(site: Site, **arguments: Any) -> Call | None:
    """Padding counts dims from the last: fits stacked values, and packed ones if N and C keep their size."""
    x: Value = arguments["self"]
    packs = x.layout is Layout.PACKED and len(arguments["pad"]) // 2 <= x.rank - 2
    layout = Layout.PACKED if packs else Layout.STACKED
    return site.same_call(map_values(arguments, lambda v: v.to(layout)), layout)


def pad(site: Site, **arguments: Any) -> Answer:
    """Padding in any mode; all but "constant" tell from the number of dims whether the operand has an N."""
    if arguments["mode"] == "constant":
        return constant_pad(site, **arguments)
    return folding(len(arguments["pad"]) // 2 + 2)(site, **arguments)


def grid_sample(site: Site, **arguments: Any) -> Answer:
    """``input [N, C, *S]`` at ``grid [N, *T, d]``: one grid for all members serves packed inputs as it is."""
    x, grid = arguments["input"], arguments["grid"]
    if x.layout is Layout.PACKED and grid.shared and not has_per_member(arguments):
        return site.same_call(arguments, Layout.PACKED, "packed: shared grid")
    return folding(channelwise=False)(site, **arguments)


@none_listed
def affine_grid(site: Site, **arguments: Any) -> Call | None:
    """``theta [N, d, d+1]`` to a grid; its ``size`` argument holds N."""
    theta: Value = arguments["theta"]
    args = (theta.to(Layout.STACKED), arguments["size"], arguments["align_corners"])
    return site.call(affine_grids, args, Layout.STACKED, "folded")


def affine_grids(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    """``theta [B, N, d, d+1]`` and a member's ``size [N, C, *T]`` -> ``[B, N, *T, d]``."""
    order = Fold.of(theta)
    grid = aten.affine_grid_generator.default(order.fold(theta), [theta.shape[0] * size[0], *size[1:]], align_corners)
    return order.unfold(grid)


PADS = {
    3: (aten.reflection_pad1d.default, aten.replication_pad1d.default),
    4: (aten.reflection_pad2d.default, aten.replication_pad2d.default),
    5: (aten.reflection_pad3d.default, aten.replication_pad3d.default),
}
UPSAMPLES = (
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
    aten.upsample_linear1d,
    aten.upsample_bilinear2d,
    aten.upsample_bicubic2d,
    aten.upsample_trilinear3d,
    aten._upsample_bilinear2d_aa,
    aten._upsample_bicubic2d_aa,
)
GRID_SAMPLERS = (aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)


# Pooling treats channels separately, so packed values stay packed and stacked ones are folded into samples.

# Fits to forward and backward of single layers, one core of a Xeon (AVX-512), 4 and 16 members.
AT_ONCE = Efficiency(8, traffic=0.14)
# In channels_last, as convolutions give it.
PACKED = Efficiency(8, traffic=0.4)
LOOP = Efficiency(5, traffic=0.4)

POOLS_1D = (
    aten.max_pool1d.default,
    aten.max_pool1d_with_indices.default,
    aten.avg_pool1d.default,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_max_pool1d.default,
)
POOLS_2D = (
    aten.max_pool2d.default,
    aten.max_pool2d_with_indices.default,
    aten.max_unpool2d.default,
    aten.avg_pool2d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_max_pool2d.default,
)
POOLS_3D = (
    aten.max_pool3d.default,
    aten.max_pool3d_with_indices.default,
    aten.max_unpool3d.default,
    aten.avg_pool3d.default,
    aten.adaptive_avg_pool3d.default,
    aten.adaptive_max_pool3d.default,
)


def fractional(site: Site, **arguments: Any) -> Answer:
    """Fractional max pooling: its random samples ``[N, C, d]`` have an N even where the input has none."""
    if arguments["self"].rank != arguments["random_samples"].shape[-1] + 2:
        return loop(site, arguments, LOOP)
    return folding(at_once=AT_ONCE, loops=LOOP)(site, **arguments)


RULES: RuleTable = merge(
    table(POOLS_1D, folding(3, at_once=AT_ONCE, loops=LOOP)),
    table(POOLS_2D, folding(4, at_once=AT_ONCE, packed=PACKED, loops=LOOP)),
    table(POOLS_3D, folding(5, at_once=AT_ONCE, packed=PACKED, loops=LOOP)),
    table((aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default), fractional),
    {aten.pad.default: pad, aten.constant_pad_nd.default: constant_pad},
    *(table(targets, folding(rank)) for rank, targets in PADS.items()),
    table((packet.default for packet in UPSAMPLES), folding()),
    table((packet.vec for packet in UPSAMPLES), folding()),
    # Without N these two take any number of leading dims, so a stacked operand of any rank is right.
    table((aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.im2col.default), folding(4)),
    table((aten.col2im.default,), folding(3)),
    {aten.channel_shuffle.default: folding(channelwise=False)},
    table(GRID_SAMPLERS, grid_sample),
    {aten.affine_grid_generator.default: affine_grid},
)

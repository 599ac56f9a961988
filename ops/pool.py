"""Pooling treats channels separately, so packed values stay packed and stacked ones are folded into samples."""

from __future__ import annotations

from typing import Any

import torch

from hfusion.ops.fold import folding
from hfusion.ops.lowering import Efficiency
from hfusion.ops.rule import Answer, RuleTable, Site, loop, merge, table

aten = torch.ops.aten

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
)

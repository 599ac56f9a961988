"""Operators, each of stacked, packed, listed and shared operands: results and gradients are those of the members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hfusion.core.errors import FusionError
from hfusion.core.layout import CONVERSIONS, Layout
from hfusion.ops.index import own_rows, rows_of_all
from hfusion.passes.batch import batch
from tests.oracle import Case, Draw, check, member_graph, t

aten = torch.ops.aten
# Of operators that are called by themselves, torch's warnings reach Python from 2.15 on.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is non-contiguous, this will lower the performance:UserWarning"),
]

C1, C2, C3 = t(2, 4, 9), t(2, 4, 6, 7), t(2, 4, 4, 5, 4)

CONVOLUTIONS = [
    Case(aten.conv1d.default, (C1, t(6, 4, 3), t(6))),
    Case(aten.conv1d.default, (C1, t(6, 2, 3), t(6), [2], [1], [2], 2)),
    Case(aten.conv1d.default, (C1, t(6, 4, 1), t(6))),
    Case(aten.conv1d.default, (C1, t(6, 4, 1), None)),
    Case(aten.conv1d.default, (C1, t(6, 4, 1), t(6), [2])),
    Case(aten.conv1d.padding, (C1, t(6, 4, 4), t(6), [1], "same")),
    Case(aten.conv2d.default, (C2, t(6, 4, 3, 3), t(6))),
    Case(aten.conv2d.default, (t(2, 1, 6, 6), t(5, 1, 3, 3), t(5), [1, 1], [1, 1])),
    Case(aten.conv2d.default, (C2, t(8, 2, 3, 3), t(8), [2, 2], [1, 1], [1, 1], 2)),
    Case(aten.conv2d.default, (C2, t(4, 1, 3, 2), None, [1, 2], [2, 1], [2, 1], 4)),
    Case(aten.conv2d.default, (C2, t(6, 4, 1, 1), t(6))),
    Case(aten.conv2d.default, (C2, t(6, 4, 1, 1), None, [2, 2])),
    Case(aten.conv2d.default, (C2, t(6, 4, 1, 1), None, [1], [1])),
    Case(aten.conv2d.padding, (C2, t(6, 4, 2, 3), t(6), [1, 1], "same", [1, 2])),
    Case(aten.conv2d.padding, (C2, t(6, 2, 2, 3), t(6), [2, 1], "valid", [1, 1], 2)),
    Case(aten.conv3d.default, (C3, t(6, 4, 2, 3, 2), t(6))),
    Case(aten.conv3d.default, (C3, t(6, 2, 2, 3, 2), t(6), [2, 1, 1], [1, 1, 0], [1, 2, 1], 2)),
    Case(aten.conv3d.default, (C3, t(6, 4, 1, 1, 1), t(6))),
    Case(aten.conv3d.padding, (C3, t(6, 4, 2, 3, 2), None, [1, 1, 1], "same")),
]

TRANSPOSED = [
    Case(aten.conv_transpose1d.default, (C1, t(4, 6, 3), t(6))),
    Case(aten.conv_transpose1d.default, (C1, t(4, 3, 3), t(6), [2], [1], [1], 2, [2])),
    Case(aten.conv_transpose2d.input, (C2, t(4, 6, 3, 3), t(6))),
    Case(aten.conv_transpose2d.input, (C2, t(4, 3, 3, 2), t(6), [2, 2], [1, 0], [1, 0], 2, [1, 2])),
    Case(aten.conv_transpose2d.input, (C2, t(4, 6, 1, 1), None)),
    Case(aten.conv_transpose3d.input, (C3, t(4, 3, 2, 3, 2), t(3), [1, 2, 1], [1, 0, 0])),
]

CONVOLUTIONS_WITHOUT_BATCH = [
    Case(aten.conv1d.default, (t(4, 9), t(6, 4, 3), t(6))),
    Case(aten.conv2d.default, (t(4, 6, 7), t(6, 2, 3, 3), t(6), [2, 2], [1, 1], [1, 1], 2)),
    Case(aten.conv2d.default, (t(4, 6, 7), t(6, 4, 3, 3), None)),
    Case(aten.conv2d.padding, (t(4, 6, 7), t(6, 4, 3, 3), t(6), [1, 1], "same")),
    Case(aten.conv3d.default, (t(4, 4, 5, 4), t(6, 4, 2, 2, 2), t(6))),
    Case(aten.conv_transpose2d.input, (t(4, 6, 7), t(4, 6, 3, 3), t(6), [2, 2])),
    Case(aten.conv_transpose2d.input, (t(4, 6, 7), t(4, 3, 3, 3), t(6), [2, 2], [1, 1], [1, 1], 2)),
]

DISTANCES = [
    Case(aten.cosine_similarity.default, (t(2, 3, 4), t(2, 3, 4))),
    Case(aten.cosine_similarity.default, (t(2, 3, 4), t(3, 1), -2, 1e-3)),
    Case(aten.cosine_similarity.default, (t(4), t(2, 4), -1)),
    Case(aten.cosine_similarity.default, (t(4), t(4), 0)),
    Case(aten.cosine_similarity.default, (t(), t(), 0)),
    Case(aten.cosine_similarity.default, (t(3), t(), 0)),
    Case(aten.pairwise_distance.default, (t(2, 3), t(2, 3))),
    Case(aten.pairwise_distance.default, (t(2, 3), t(3), 1.0, 1e-6, True)),
    Case(aten.pairwise_distance.default, (t(3), t(5, 2, 3), 3.0)),
    Case(aten.pairwise_distance.default, (t(3), t(3))),
]


def indices(*shape: int) -> object:
    return t(*shape, kind="integers", high=5)


EMBEDDINGS = [
    Case(aten.embedding.default, (t(5, 3), indices(2, 4))),
    Case(aten.embedding.default, (t(5, 3), indices(4))),
    Case(aten.embedding.default, (t(5, 3), indices())),
    Case(aten.embedding.default, (t(5, 3), indices(0, 4))),
    Case(aten.embedding.default, (t(5, 3), indices(3, 4), 2)),
    Case(aten.embedding.default, (t(5, 3), indices(3, 4), 0, True)),
    Case(aten.embedding.default, (t(5, 3), indices(3, 4), -1, True)),
    # Offsets that are all 0: an empty bag, and one that holds everything.
    *(
        Case(
            aten.embedding_bag.padding_idx,
            (t(5, 3), indices(6), t(2, kind="integers", high=1), False, mode, False, None, False, 2),
            members=(1, 3),
        )
        for mode in (0, 1)
    ),
]

WITHOUT_RULES = [
    Case(aten.trace.default, (t(3, 4),)),
    Case(aten.masked_scatter.default, (t(2, 3), t(2, 3, kind="bool"), t(2, 3))),
    Case(aten.renorm.default, (t(3, 4), 2, 0, 1.0)),
    Case(aten.put.default, (t(3, 4), t(2, kind="integers", high=9), t(2), True)),
    Case(aten.gru.input, (t(2, 3, 4), t(1, 2, 5), [t(15, 4), t(15, 5), t(15), t(15)], True, 1, 0.0, True, False, True)),
]

INDEXED = t(3, 4, 5)


def ints(*shape: int, high: int = 3) -> Draw:
    return t(*shape, kind="integers", high=high)


INDEXING = [
    Case(aten.index.Tensor, (INDEXED, [ints(2)])),
    Case(aten.index.Tensor, (INDEXED, [ints()])),
    Case(aten.index.Tensor, (INDEXED, [ints(2, 3)])),
    Case(aten.index.Tensor, (INDEXED, [None, ints(2)])),
    Case(aten.index.Tensor, (INDEXED, [None, ints(2, 2), ints(2)])),
    Case(aten.index.Tensor, (INDEXED, [ints(2), ints(2, 1)])),
    Case(aten.index.Tensor, (INDEXED, [None, None, ints(2, 3)])),
    Case(aten.index.Tensor, (INDEXED, [ints(2), None, ints(2)])),
    Case(aten.index.Tensor, (t(2, 3, 4, 5), [None, ints(2), None, ints(3, 2)])),
    Case(aten.index.Tensor, (t(2, 3, 4, 5), [None, None, ints(3), ints(3)])),
    Case(aten.index.Tensor, (ints(6, high=9), [ints(2, 2)])),
    Case(aten.index_put.default, (INDEXED, [ints(2)], t(2, 4, 5))),
    Case(aten.index_put.default, (INDEXED, [ints(2)], t(5), True)),
    Case(aten.index_put.default, (INDEXED, [ints(2), ints(2)], t())),
    Case(aten.index_put.default, (INDEXED, [None, ints(2)], t(3, 2, 5), True)),
    Case(aten.index_put.default, (INDEXED, [None, ints(3), ints(3)], t(3, 3), True)),
    Case(aten.index_put.default, (INDEXED, [ints(2), None, ints(2)], t(2, 4), True)),
    Case(aten.index_put.default, (INDEXED, [t(3, 4, kind="bool")], t())),
    Case(aten.index_put.default, (INDEXED, [t(3, kind="bool")], t(), True)),
    Case(aten.index_put.default, (INDEXED, [t(3, 4, 5, kind="bool")], t())),
    Case(aten.index_put.default, (INDEXED, [None, t(4, kind="bool")], t())),
    Case(aten.index_put.default, (INDEXED, [t(3, kind="bool")], t(4, 5))),
    Case(aten.index_select.default, (INDEXED, 0, ints(4))),
    Case(aten.index_select.default, (INDEXED, 1, ints(2))),
    Case(aten.index_select.default, (INDEXED, -1, ints(2))),
    Case(aten.gather.default, (INDEXED, 1, ints(3, 2, 5))),
    Case(aten.gather.default, (INDEXED, -1, ints(2, 4, 1))),
    Case(aten.scatter.src, (INDEXED, 2, t(3, 4, 1, kind="integers", high=5), t(3, 4, 1))),
    Case(aten.scatter.value, (INDEXED, 0, ints(1, 4, 5), 1.5)),
    Case(aten.scatter_add.default, (INDEXED, 1, ints(3, 6, 5), t(3, 6, 5))),
    Case(aten.scatter_reduce.two, (INDEXED, 1, ints(3, 6, 5), t(3, 6, 5), "amax"), members=(2,)),
    Case(aten.index_add.default, (INDEXED, 1, ints(2), t(3, 2, 5)), {"alpha": 2.0}),
    Case(aten.index_add.default, (INDEXED, -1, ints(6), t(3, 4, 6))),
    Case(aten.index_copy.default, (INDEXED, 0, ints(1), t(1, 4, 5))),
    Case(aten.index_fill.int_Scalar, (INDEXED, 1, ints(2), 3.0)),
    Case(aten.index_fill.int_Tensor, (INDEXED, 1, ints(2), t())),
    Case(aten.take_along_dim.default, (INDEXED, ints(3, 2, 1), 1)),
    Case(aten.take_along_dim.default, (INDEXED, ints(2))),
    Case(aten.take.default, (INDEXED, ints(2, 2, high=9))),
    Case(aten.bucketize.Tensor, (INDEXED, Draw((4,), "unit"))),
    Case(aten.one_hot.default, (ints(2, 3), 3)),
    Case(aten.one_hot.default, (ints(), 3)),
    Case(aten.masked_scatter.default, (t(2, 3), t(2, 3, kind="bool"), t(2, 3))),
    Case(aten.searchsorted.Tensor, (ints(3, 4), ints(3, 2))),
    Case(aten.put.default, (INDEXED, ints(2, high=9), t(2), True)),
]

P1, P2, P3 = t(2, 3, 7), t(2, 3, 7, 6), t(2, 3, 5, 4, 6)

POOLS = [
    Case(aten.max_pool1d.default, (P1, [2], [2])),
    Case(aten.max_pool1d_with_indices.default, (P1, [3], [2], [1], [1], True)),
    Case(aten.avg_pool1d.default, (P1, [3], [1], [1], False, False)),
    Case(aten.adaptive_avg_pool1d.default, (P1, [3])),
    Case(aten.adaptive_max_pool1d.default, (P1, [3])),
    Case(aten.max_pool2d.default, (P2, [2, 3], [2, 1], [1, 1], [1, 2], True)),
    Case(aten.max_pool2d_with_indices.default, (P2, [2, 2], [2, 2])),
    Case(aten.avg_pool2d.default, (P2, [3, 3], [2, 2], [1, 1], False, True, 5)),
    Case(aten.adaptive_avg_pool2d.default, (P2, [1, 1])),
    Case(aten.adaptive_avg_pool2d.default, (P2, [3, 2])),
    Case(aten.adaptive_max_pool2d.default, (P2, [3, 2])),
    Case(aten.max_pool3d.default, (P3, [2, 2, 2])),
    Case(aten.max_pool3d_with_indices.default, (P3, [2, 2, 2], [1, 2, 2], [0, 1, 1])),
    Case(aten.avg_pool3d.default, (P3, [2, 2, 2], [2, 2, 2])),
    Case(aten.adaptive_avg_pool3d.default, (P3, [2, 2, 2])),
    Case(aten.adaptive_max_pool3d.default, (P3, [2, 2, 2])),
    Case(aten.max_unpool2d.default, (t(2, 3, 3, 4), t(2, 3, 3, 4, kind="integers", high=1), [6, 7])),
]

POOLS_WITHOUT_BATCH = [
    Case(aten.max_pool1d.default, (t(3, 7), [2], [2])),
    Case(aten.adaptive_avg_pool1d.default, (t(3, 7), [2])),
    Case(aten.max_pool2d.default, (t(3, 6, 7), [2, 2], [2, 2])),
    Case(aten.max_pool2d_with_indices.default, (t(3, 6, 7), [2, 2], [2, 2])),
    Case(aten.avg_pool2d.default, (t(3, 6, 7), [2, 2], [2, 2])),
    Case(aten.adaptive_avg_pool2d.default, (t(3, 6, 7), [1, 1])),
    Case(aten.adaptive_max_pool2d.default, (t(3, 6, 7), [2, 2])),
    Case(aten.max_pool3d.default, (t(3, 4, 5, 6), [2, 2, 2], [2, 2, 2])),
    Case(aten.avg_pool3d.default, (t(3, 4, 5, 6), [2, 2, 2], [2, 2, 2])),
]

FRACTIONAL = [
    Case(aten.fractional_max_pool2d.default, (P2, [2, 2], [3, 3], t(2, 3, 2, kind="unit", grad=False))),
    Case(aten.fractional_max_pool3d.default, (P3, [2, 2, 2], [2, 2, 2], t(2, 3, 3, kind="unit", grad=False))),
    Case(aten.fractional_max_pool2d.default, (t(3, 7, 6), [2, 2], [3, 3], t(1, 3, 2, kind="unit", grad=False))),
]

X = t(2, 3, 4, 5)

DIMS: list[list[int]] = [[0], [1], [-1], [2, 3], [0, 2, 3], [], [0, 1, -1, -2]]

SEVERAL = [aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default]

ONE = [aten.max.dim, aten.min.dim, aten.median.dim, aten.prod.dim_int, aten.argmax.default, aten.all.dim, aten.any.dim]

ALL = [
    aten.sum.default,
    aten.mean.default,
    aten.prod.default,
    aten.max.default,
    aten.min.default,
    aten.all.default,
    aten.any.default,
    aten.norm.Scalar,
    aten.argmax.default,
    aten.argmin.default,
    aten.median.default,
    aten.nansum.default,
    aten.count_nonzero.default,
    aten.linalg_vector_norm.default,
]

SPREAD = [aten.var.default, aten.std.default, aten.var_mean.default, aten.std_mean.default]

SAME = [aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default]

SOFT = [aten.softmax.int, aten.log_softmax.int, aten.special_softmax.default]

REDUCTIONS = [
    *(Case(target, (X, dim, keep)) for target in SEVERAL for dim in DIMS for keep in (False, True) if dim),
    *(Case(target, (X, dim, keep)) for target in ONE for dim in (0, 1, -1) for keep in (False, True)),
    *(Case(target, (shape,)) for target in ALL for shape in (X, t(3), t())),
    *(Case(target, (X, dim)) for target in SAME for dim in (0, 1, -1)),
    *(Case(target, (X, dim)) for target in SOFT for dim in (0, 1, 2, -1)),
    *(Case(target, (shape, unbiased)) for target in SPREAD for shape in (X, t(3)) for unbiased in (True, False)),
    *(Case(target, (X, dim)) for target in (aten.sort.default, aten.argsort.default) for dim in (0, 1, -1)),
    Case(aten.sum.dim_IntList, (X, [])),
    Case(aten.sum.dim_IntList, (t(), [0])),
    Case(aten.sum.dim_IntList, (X, None, True)),
    Case(aten.sum.default, (t(2, 3, kind="integers", high=9),), {"dtype": torch.float32}),
    Case(aten.sum.default, (t(2, 3, kind="bool"),)),
    Case(aten.sum.dim_IntList, (t(2, 3, 4, kind="integers", high=9), [-1]), {"dtype": torch.float64}),
    Case(aten.amax.default, (X,)),
    Case(aten.amax.default, (t(3, 4, kind="integers", high=3),)),
    Case(aten.max.default, (t(3, 4, kind="integers", high=3),)),
    Case(aten.var.correction, (X, [2, 3]), {"correction": 0}),
    Case(aten.var.correction, (X, [1])),
    Case(aten.std.correction, (X,), {"correction": 2, "keepdim": True}),
    Case(aten.var_mean.correction, (X, [0, 2, 3]), {"correction": 0, "keepdim": True}),
    Case(aten.var.dim, (X, [-1], True, True)),
    Case(aten.norm.ScalarOpt_dim, (X, 2, [1], True)),
    Case(aten.norm.ScalarOpt_dim, (X, 1, [2, 3])),
    Case(aten.norm.ScalarOpt_dtype, (X, 2), {"dtype": torch.float64}),
    Case(aten.linalg_vector_norm.default, (X, 3, [1, 2], True)),
    Case(aten.linalg_vector_norm.default, (X, 2, [-1])),
    Case(aten.linalg_norm.default, (t(3, 4),)),
    Case(aten.topk.default, (X, 2)),
    Case(aten.topk.default, (X, 2, 1)),
    Case(aten.sort.stable, (X,), {"stable": True, "dim": 1, "descending": True}),
    Case(aten.kthvalue.default, (X, 2, 2)),
    Case(aten.mode.default, (t(3, 6, kind="integers", high=3),)),
    Case(aten._softmax.default, (X, 1, False)),
    Case(aten._log_softmax.default, (X, -1, False)),
    Case(aten.softmax.int, (t(), 0)),
    Case(aten.cumsum.default, (t(), -1)),
    Case(aten.aminmax.default, (t(3, 4, grad=False),)),
    Case(aten.count_nonzero.dim_IntList, (t(3, 4, 2, kind="integers", high=2), [2])),
    Case(aten.all.dims, (t(3, 4, 2, kind="bool"), [1, -1])),
    Case(aten.any.dims, (t(3, 4, 2, kind="bool"),)),
    Case(aten.any.dims, (t(3, 4, 2, kind="bool"), [])),
]

X1, X2, X3 = t(2, 4, 5), t(2, 4, 5, 6), t(2, 4, 3, 4, 5)

PADS = [
    Case(aten.pad.default, (X2, [1, 2, 0, 1])),
    Case(aten.pad.default, (X2, [1, -1], "constant", 2.0)),
    Case(aten.pad.default, (X2, [0, 0, 0, 0, 1, 2], "constant", 1.0)),
    Case(aten.pad.default, (t(4), [2, 1])),
    Case(aten.pad.default, (X1, [1, 2], "reflect")),
    Case(aten.pad.default, (X2, [1, 1, 2, 1], "reflect")),
    Case(aten.pad.default, (X2, [1, 1, 2, 1], "replicate")),
    Case(aten.pad.default, (X2, [1, 1, 2, 1], "circular")),
    Case(aten.pad.default, (t(3, 4, 5), [1, 1, 2, 1], "reflect")),
    Case(aten.pad.default, (X3, [1, 1, 2, 1, 1, 0], "replicate")),
    Case(aten.constant_pad_nd.default, (X2, [1, 1, 2, 0], 0.5)),
    Case(aten.reflection_pad1d.default, (X1, [1, 2])),
    Case(aten.reflection_pad2d.default, (X2, [1, 2, 1, 1])),
    Case(aten.replication_pad2d.default, (t(3, 4, 5), [1, 2, 1, 1])),
    Case(aten.replication_pad3d.default, (X3, [1, 1, 2, 1, 1, 0])),
]

UPSAMPLES = [
    Case(aten.upsample_nearest1d.vec, (X1, [8], None)),
    Case(aten.upsample_nearest2d.vec, (X2, None, [2.0, 2.0])),
    Case(aten.upsample_nearest2d.default, (X2, [7, 7])),
    Case(aten.upsample_nearest3d.vec, (X3, None, [2.0, 1.0, 2.0])),
    Case(aten._upsample_nearest_exact1d.vec, (X1, [8], None)),
    Case(aten._upsample_nearest_exact2d.vec, (X2, [7, 3], None)),
    Case(aten._upsample_nearest_exact3d.vec, (X3, None, [2.0, 1.0, 2.0])),
    Case(aten.upsample_linear1d.vec, (X1, [8], True, None)),
    Case(aten.upsample_bilinear2d.vec, (X2, None, False, [2.0, 1.5])),
    Case(aten.upsample_bilinear2d.default, (X2, [7, 7], True)),
    Case(aten.upsample_bicubic2d.vec, (X2, [7, 7], False, None)),
    Case(aten.upsample_trilinear3d.vec, (X3, [4, 4, 4], False, None)),
    Case(aten._upsample_bilinear2d_aa.vec, (X2, [3, 3], False, None)),
    Case(aten._upsample_bicubic2d_aa.vec, (X2, [3, 3], False, None)),
]

SHUFFLES = [
    Case(aten.pixel_shuffle.default, (X2, 2)),
    Case(aten.pixel_shuffle.default, (t(4, 3, 2), 2)),
    Case(aten.pixel_shuffle.default, (t(2, 3, 4, 3, 2), 2)),
    Case(aten.pixel_unshuffle.default, (t(2, 3, 4, 6), 2)),
    Case(aten.pixel_unshuffle.default, (t(3, 4, 6), 2)),
    Case(aten.channel_shuffle.default, (X2, 2)),
    Case(aten.channel_shuffle.default, (t(4, 6, 3), 2)),
    Case(aten.im2col.default, (X2, [2, 2], [1, 1], [1, 0], [2, 1])),
    Case(aten.im2col.default, (t(3, 4, 5), [2, 2], [1, 1], [0, 0], [1, 1])),
    Case(aten.col2im.default, (t(2, 12, 20), [5, 6], [2, 2], [1, 1], [0, 0], [1, 1])),
    Case(aten.col2im.default, (t(12, 20), [5, 6], [2, 2], [1, 1], [0, 0], [1, 1])),
]

GRIDS = [
    Case(aten.grid_sampler.default, (X2, t(2, 3, 3, 2, kind="unit"), 0, 0, False)),
    Case(aten.grid_sampler.default, (X2, t(2, 3, 3, 2), 0, 1, True)),
    Case(aten.grid_sampler.default, (X2, t(2, 3, 3, 2), 2, 2, False)),
    Case(aten.grid_sampler.default, (X3, t(2, 2, 3, 3, 3), 0, 0, False)),
    Case(aten.affine_grid_generator.default, (t(2, 2, 3), [2, 4, 3, 5], False)),
    Case(aten.affine_grid_generator.default, (t(2, 3, 4), [2, 4, 3, 5, 2], True)),
]

SHAPES = [
    Case(aten.view.default, (X, [2, -1])),
    Case(aten.view.default, (X, [-1, 5])),
    Case(aten.view.default, (t(), [1, 1])),
    Case(aten.reshape.default, (X, [2, 6, 10])),
    Case(aten.reshape.default, (X, [-1])),
    Case(aten.reshape.default, (X, [-1, 12, 5])),
    Case(aten._unsafe_view.default, (t(6, 4), [2, 3, 4])),
    Case(aten.view_as.default, (t(6, 4), t(2, 12))),
    Case(aten.flatten.using_ints, (X, 1)),
    Case(aten.flatten.using_ints, (X, -2, -1)),
    Case(aten.flatten.using_ints, (X, 0, 1)),
    Case(aten.flatten.using_ints, (t(4), 0)),
    Case(aten.flatten.using_ints, (t(), 0)),
    Case(aten.ravel.default, (t(2, 3),)),
    Case(aten.unflatten.int, (t(2, 6, 4), 1, [2, 3])),
    Case(aten.unflatten.int, (t(2, 6, 4), 1, [-1, 3])),
    Case(aten.unflatten.int, (t(2, 6, 4), -1, [2, -1])),
    Case(aten.unflatten.int, (t(4, 6), 0, [2, 2])),
    Case(aten.permute.default, (X, [0, 2, 3, 1])),
    Case(aten.permute.default, (X, [0, 1, -1, -2])),
    Case(aten.permute.default, (t(3, 4), [1, 0])),
    Case(aten.transpose.int, (X, 1, 2)),
    Case(aten.transpose.int, (X, -1, -2)),
    Case(aten.transpose.int, (t(3, 4), 0, 1)),
    Case(aten.t.default, (t(3, 4),)),
    Case(aten.t.default, (t(3),)),
    Case(aten.numpy_T.default, (t(3, 4),)),
    Case(aten.mT.default, (t(2, 3, 4),)),
    Case(aten.movedim.int, (X, 1, -1)),
    Case(aten.movedim.intlist, (X, [2, 3], [3, 2])),
    Case(aten.swapaxes.default, (X, 0, -1)),
    Case(aten.unsqueeze.default, (X, 0)),
    Case(aten.unsqueeze.default, (X, -1)),
    Case(aten.unsqueeze.default, (t(3, 4), 1)),
    Case(aten.unsqueeze.default, (t(3, 4), 2)),
    Case(aten.unsqueeze.default, (t(), 0)),
    Case(aten.unsqueeze.default, (t(), -1)),
    Case(aten.squeeze.default, (t(1, 3, 1, 4),)),
    Case(aten.squeeze.default, (t(2, 3),)),
    Case(aten.squeeze.default, (t(1),)),
    Case(aten.squeeze.dim, (t(1, 3, 1, 4), 0)),
    Case(aten.squeeze.dim, (t(2, 1, 1), -1)),
    Case(aten.squeeze.dim, (t(2, 1, 4), 1)),
    Case(aten.squeeze.dim, (t(2, 3), 0)),
    Case(aten.squeeze.dims, (t(2, 3, 1, 1), [2, -1])),
    Case(aten.slice.Tensor, (X, 1, 0, 2)),
    Case(aten.slice.Tensor, (X, -1, 1, 9223372036854775807, 2)),
    Case(aten.slice.Tensor, (X, 0, 1)),
    Case(aten.slice.Tensor, (X, 1, 0, 9223372036854775807)),
    Case(aten.narrow.default, (X, 2, 1, 2)),
    Case(aten.select.int, (X, 1, -1)),
    Case(aten.select.int, (X, 2, 0)),
    Case(aten.select.int, (t(4), 0, 2)),
    Case(aten.split.Tensor, (X, 2, 2)),
    Case(aten.split.Tensor, (X, 2, 1)),
    Case(aten.split_with_sizes.default, (X, [1, 4], -1)),
    Case(aten.chunk.default, (X, 2, 0)),
    Case(aten.chunk.default, (X, 3, 1)),
    Case(aten.tensor_split.sections, (X, 3, 3)),
    Case(aten.tensor_split.indices, (t(5), [1, 3])),
    Case(aten.unbind.int, (X, 0)),
    Case(aten.unbind.int, (X, -2)),
    Case(aten.cat.default, ([t(2, 3, 4), t(2, 2, 4)], 1)),
    Case(aten.cat.default, ([t(2, 3, 4), t(2, 3, 1)], -1)),
    Case(aten.cat.default, ([t(3), t(2)],)),
    Case(aten.cat.default, ([t(0), t(2, 3)],)),
    Case(aten.stack.default, ([t(2, 3), t(2, 3)], -1)),
    Case(aten.stack.default, ([t(2, 3), t(2, 3)],)),
    Case(aten.stack.default, ([t(), t()],)),
    Case(aten.hstack.default, ([t(2, 3), t(2, 2)],)),
    Case(aten.hstack.default, ([t(3), t(2)],)),
    Case(aten.vstack.default, ([t(3), t(3)],)),
    Case(aten.vstack.default, ([t(1, 3), t(2, 3)],)),
    Case(aten.dstack.default, ([t(1, 3, 2), t(1, 3, 1)],)),
    Case(aten.column_stack.default, ([t(3), t(3, 2)],)),
    Case(aten.expand.default, (t(3, 1), [2, 3, 4])),
    Case(aten.expand.default, (t(1, 3, 1), [2, -1, 4])),
    Case(aten.expand.default, (t(2, 1, 1), [-1, 3, 1])),
    Case(aten.expand.default, (t(), [2])),
    Case(aten.broadcast_to.default, (t(3), [2, 3])),
    Case(aten.expand_as.default, (t(3, 1), t(2, 3, 4))),
    Case(aten.repeat.default, (t(2, 3), [2, 1, 2])),
    Case(aten.tile.default, (t(2, 3, 2), [2])),
    Case(aten.repeat_interleave.self_int, (t(2, 3), 2)),
    Case(aten.repeat_interleave.self_int, (t(2, 3, 2), 3, 1)),
    Case(aten.repeat_interleave.self_int, (t(2, 3, 2), 3, -1), {"output_size": 6}),
    Case(aten.roll.default, (X, [1], [1])),
    Case(aten.roll.default, (X, [1, -1], [2, -1])),
    Case(aten.roll.default, (t(2, 3), [1])),
    Case(aten.flip.default, (X, [0, -1])),
    Case(aten.flip.default, (X, [1])),
    Case(aten.fliplr.default, (t(2, 3),)),
    Case(aten.rot90.default, (t(2, 3, 4), 1, [0, 1])),
    Case(aten.tril.default, (t(3, 4), 1)),
    Case(aten.triu.default, (X, -1)),
    Case(aten.diagonal.default, (X, 0, -2, -1)),
    Case(aten.diagonal.default, (t(3, 3),)),
    Case(aten.diag_embed.default, (t(2, 3),)),
    Case(aten.diag_embed.default, (t(2, 3), 0, 0, 1)),
    Case(aten.unfold.default, (X, 3, 2, 2)),
    Case(aten.unfold.default, (X, 1, 2, 1)),
    Case(aten.slice_scatter.default, (X, t(2, 3, 2, 5), 2, 1, 3)),
    Case(aten.slice_scatter.default, (X, t(2, 1, 4, 5), 1, 0, 1)),
    Case(aten.select_scatter.default, (X, t(2, 3, 4), -1, 1)),
    Case(aten.select_scatter.default, (X, t(3, 4, 5), 0, 1)),
    Case(aten.diagonal_scatter.default, (t(3, 3), t(3))),
    Case(aten.glu.default, (t(2, 4, 6), -1)),
    Case(aten.glu.default, (t(2, 4, 6), 1)),
    Case(aten.new_zeros.default, (X, [2, 3])),
    Case(aten.new_full.default, (X, [2, 3], 1.5)),
    Case(aten.meshgrid.indexing, ([t(3), t(2)],), {"indexing": "ij"}),
    Case(aten.diff.default, (t(3, 4),)),
    Case(aten.atleast_2d.default, (t(3),)),
    Case(aten.pixel_shuffle.default, (t(2, 4, 3, 3), 2)),
    Case(aten.channel_shuffle.default, (t(2, 4, 3, 3), 2)),
    Case(aten.block_diag.default, ([t(2, 2), t(1, 3)],)),
]


OPERATORS = [
    *CONVOLUTIONS, *TRANSPOSED, *CONVOLUTIONS_WITHOUT_BATCH, *DISTANCES, *EMBEDDINGS, *WITHOUT_RULES, *INDEXING, *POOLS,
    *POOLS_WITHOUT_BATCH, *FRACTIONAL, *REDUCTIONS, *PADS, *UPSAMPLES, *SHUFFLES, *GRIDS, *SHAPES,
]  # fmt: skip


@pytest.mark.parametrize("case", OPERATORS, ids=str)
def test_operator(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("wrong", [5, -1, 7])
@pytest.mark.parametrize(
    "lookup",
    [
        lambda index, weight: rows_of_all(index, weight, -1),
        lambda index, weight: own_rows(index.expand(3, 2), weight, -1, False),
    ],
    ids=["shared", "own"],
)
def test_an_index_out_of_range_never_reads_another_member(wrong: int, lookup: Callable[..., Tensor]) -> None:
    weight, index = torch.randn(3, 5, 2), torch.tensor([0, wrong])
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        lookup(index, weight)


@pytest.mark.parametrize("layout", [Layout.STACKED, Layout.PACKED, Layout.LISTED])
@pytest.mark.parametrize("target", [aten.index.Tensor, aten.one_hot.default, aten.item.default], ids=str)
def test_value_dependent_shapes_are_refused(target: Any, layout: Layout) -> None:
    graph = torch.fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    x.meta["val"], mask.meta["val"] = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    args = (x, [mask]) if target is aten.index.Tensor else (x,)
    call = graph.call_function(target, args)
    call.meta["val"] = torch.zeros(4)
    graph.output((call,))
    with pytest.raises(FusionError, match="members"):
        batch(graph, [layout, layout], 2)


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_sizes_are_those_of_a_member(layout: Layout, dim: int) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2, 3, 4)
    size = graph.call_function(aten.sym_size.int, (x, dim))
    count = graph.call_function(aten.sym_numel.default, (x,))
    size.meta["val"], count.meta["val"] = (2, 3, 4)[dim], 24
    full = graph.call_function(aten.full.default, ([size, count], 1.0))
    full.meta["val"] = torch.zeros(size.meta["val"], 24)
    graph.output((full,))
    stacked = torch.zeros(5, 2, 3, 4)
    convert = CONVERSIONS.get((Layout.STACKED, layout), lambda value, _: value)
    (output,) = batch(graph, [layout], 5)(stacked[0] if layout is Layout.SHARED else convert(stacked, 5))
    assert output.shape == (5, (2, 3, 4)[dim], 24)


def test_a_stack_inside_a_larger_one_is_read_from_where_it_begins() -> None:
    graph = member_graph(Case(aten.as_strided.default, (t(3, 4), [2], [5], 1)), [torch.zeros(3, 4)])
    whole = torch.randn(5, 3, 4)
    (output,) = batch(graph, [Layout.STACKED], 2)(whole[2:4])
    assert torch.equal(output, torch.stack([row.clone().as_strided([2], [5], 1) for row in whole[2:4]]))


def test_writes_at_addresses_are_refused() -> None:
    case = Case(aten.as_strided_scatter.default, (t(3, 4), t(2), [2], [5]))
    with pytest.raises(FusionError, match="by index or by slices"):
        batch(member_graph(case, [torch.zeros(3, 4), torch.zeros(2)]), [Layout.STACKED, Layout.SHARED], 2)


def test_a_members_memory_is_read_as_it_lies() -> None:
    check(Case(aten.as_strided.default, (t(3, 4), [2, 3], [4, 1], 1)))
    graph = member_graph(Case(aten.as_strided.default, (t(3, 4), [2], [1])), [torch.zeros(4, 3).t()])
    with pytest.raises(FusionError, match="strides"):
        batch(graph, [Layout.STACKED], 2)

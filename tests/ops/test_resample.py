from __future__ import annotations

import pytest
import torch

from tests.oracle import Case, check, t

aten = torch.ops.aten

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


@pytest.mark.parametrize("case", PADS, ids=str)
def test_pad(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", UPSAMPLES, ids=str)
def test_upsample(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", SHUFFLES, ids=str)
def test_shuffle(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", GRIDS, ids=str)
def test_grid(case: Case) -> None:
    check(case)

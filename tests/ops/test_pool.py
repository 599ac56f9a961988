from __future__ import annotations

import pytest
import torch

from tests.oracle import Case, check, t

aten = torch.ops.aten

X1, X2, X3 = t(2, 3, 7), t(2, 3, 7, 6), t(2, 3, 5, 4, 6)

CASES = [
    Case(aten.max_pool1d.default, (X1, [2], [2])),
    Case(aten.max_pool1d_with_indices.default, (X1, [3], [2], [1], [1], True)),
    Case(aten.avg_pool1d.default, (X1, [3], [1], [1], False, False)),
    Case(aten.adaptive_avg_pool1d.default, (X1, [3])),
    Case(aten.adaptive_max_pool1d.default, (X1, [3])),
    Case(aten.max_pool2d.default, (X2, [2, 3], [2, 1], [1, 1], [1, 2], True)),
    Case(aten.max_pool2d_with_indices.default, (X2, [2, 2], [2, 2])),
    Case(aten.avg_pool2d.default, (X2, [3, 3], [2, 2], [1, 1], False, True, 5)),
    Case(aten.adaptive_avg_pool2d.default, (X2, [1, 1])),
    Case(aten.adaptive_avg_pool2d.default, (X2, [3, 2])),
    Case(aten.adaptive_max_pool2d.default, (X2, [3, 2])),
    Case(aten.max_pool3d.default, (X3, [2, 2, 2])),
    Case(aten.max_pool3d_with_indices.default, (X3, [2, 2, 2], [1, 2, 2], [0, 1, 1])),
    Case(aten.avg_pool3d.default, (X3, [2, 2, 2], [2, 2, 2])),
    Case(aten.adaptive_avg_pool3d.default, (X3, [2, 2, 2])),
    Case(aten.adaptive_max_pool3d.default, (X3, [2, 2, 2])),
    Case(aten.max_unpool2d.default, (t(2, 3, 3, 4), t(2, 3, 3, 4, kind="integers", high=1), [6, 7])),
]

WITHOUT_BATCH = [
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
    Case(aten.fractional_max_pool2d.default, (X2, [2, 2], [3, 3], t(2, 3, 2, kind="unit", grad=False))),
    Case(aten.fractional_max_pool3d.default, (X3, [2, 2, 2], [2, 2, 2], t(2, 3, 3, kind="unit", grad=False))),
    Case(aten.fractional_max_pool2d.default, (t(3, 7, 6), [2, 2], [3, 3], t(1, 3, 2, kind="unit", grad=False))),
]


@pytest.mark.parametrize("case", CASES + FRACTIONAL, ids=str)
def test_pool(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", WITHOUT_BATCH, ids=str)
def test_pool_without_batch(case: Case) -> None:
    check(case)
